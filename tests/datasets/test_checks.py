"""Every rule names file and row, and what is left out is counted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from archipel.datasets import ArrayDataset, Batches, Subset, checked, open_parquet, write_records
from archipel.datasets.order import Order
from archipel.errors import DatasetError
from tests.datasets.readers.test_foreign import Pairs, X, _Iterated
from tests.datasets.test_batches import InBlocks


def broken(**changes: tuple[int, float]) -> dict[str, np.ndarray]:
    arrays = {"input": np.ones((50, 4), np.float32), "label": np.arange(50) % 10}
    for name, (row, value) in changes.items():
        arrays[name].reshape(50, -1)[row, -1] = value
    return arrays


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input": (17, np.nan)}, r"row 17: field 'input' is nan; correct it or leave"),
        ({"input": (49, -np.inf)}, r"row 49: field 'input' is -inf"),
        ({"label": (3, 10)}, r"row 3: field 'label' has label 10, expected 0\.\.9"),
        ({"label": (0, -1)}, r"row 0: field 'label' has label -1"),
    ],
)
def test_a_broken_rule_names_the_row(tmp_path: Path, changes: dict, message: str) -> None:
    arrays = broken(**changes)
    row = next(iter(changes.values()))[0]
    write_records(arrays, tmp_path / "t.parquet", group_bytes=100)
    for data, where in ((arrays, "the arrays"), (tmp_path / "t.parquet", str(tmp_path / "t.parquet"))):
        with pytest.raises(DatasetError, match=message) as caught:
            list(Batches(checked(data, classes={"label": 10}), 8, seed=1))
        assert str(caught.value).startswith(f"{where}, row {row}: ")
        kept = checked(data, classes={"label": 10}, on_bad="skip")
        assert len(kept) == 49
        assert kept.left_out.count == 1
        assert f"{where}, row {row}: " in kept.left_out.first[0]
        labels = np.concatenate([batch["label"] for batch in Batches(kept, 8, shuffle=False)])
        assert np.array_equal(labels, np.delete(arrays["label"], row))


def test_numbers_whose_sum_overflows_are_fine() -> None:
    large = np.full((4, 3), 3e38, np.float32)
    assert len(list(Batches(checked({"x": large}), 4))) == 1
    assert len(checked({"x": np.full(4, np.nan)}, finite=False, on_bad="skip")) == 4


def test_rows_that_cannot_be_read_are_left_out() -> None:
    kept = checked(Pairs(ValueError("boom")), on_bad="skip")
    assert len(kept) == 7
    assert str(kept.left_out) == "1 left out: Pairs, example 5: ValueError: boom; mend it or leave it out"
    assert kept.locate(5) == "Pairs, example 6"


def test_once_leaves_out_as_it_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("archipel.datasets.taking._PIECE_ELEMENTS", 12)
    once = checked(Pairs(ValueError("boom")), on_bad="skip", once=True)
    sevens = [X[row, 0].item() for row in (0, 1, 2, 3, 4, 6, 7)]
    for start in (0, 3, 6):
        assert [value for piece in once.read(start) for value in piece["input"][:, 0].tolist()] == sevens[start:]
        assert once.left_out.count == 1


def test_a_stream_is_checked_as_it_comes() -> None:
    data = Pairs((X[5] * np.nan, 9))
    with pytest.raises(DatasetError, match="example 5: field 'input' is nan"):
        list(Batches(checked(_Iterated(data)), 3, shuffle=False))
    stream = checked(_Iterated(data), on_bad="skip")
    rows = [batch["input"][:, 0].tolist() for batch in Batches(stream, 3, shuffle=False)]
    assert rows == [[0, 3, 6], [9, 12, 18], [21]]
    assert stream.left_out.count == 1
    assert np.concatenate([piece["input"] for piece in stream.read(5)])[:, 0].tolist() == [18, 21]


def test_fields_that_are_missing_or_no_labels() -> None:
    with pytest.raises(DatasetError, match="no field 'target'; the data has input, label"):
        checked(broken(), need=["target"])
    with pytest.raises(DatasetError, match=r"10 classes of field 'input', which is float32\[4\]; expected labels"):
        checked(broken(), classes={"input": 10})
    named = ArrayDataset(broken(), classes={"label": "abcde"})
    assert len(checked(named, on_bad="skip")) == 25


def test_blocks_stay_where_the_order_does(tmp_path: Path) -> None:
    data = InBlocks(60)
    chosen = Subset(data, np.arange(0, 60, 3))
    assert [chosen.take(np.arange(a, b))["label"].tolist() for a, b in zip(chosen.blocks, chosen.blocks[1:])] == [
        [row for row in range(a, b) if row % 3 == 0] for a, b in zip(data.blocks, data.blocks[1:])
    ]
    assert sorted(Order(chosen, True, 1).rows(0, 0, 20)) == list(range(20))
    assert Subset(data, [3, 2]).blocks is None
    write_records(broken(), tmp_path / "t.parquet", group_bytes=100)
    assert checked(tmp_path / "t.parquet").blocks.tolist() == open_parquet(tmp_path / "t.parquet").blocks.tolist()
