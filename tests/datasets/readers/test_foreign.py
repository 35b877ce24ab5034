"""Data sets of PyTorch, against its DataLoader, and of Hugging Face (an object with what is used of theirs)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torch.utils.data import Dataset as TorchDataset

from archipel.datasets import Batches, as_dataset
from archipel.errors import DatasetError

X, Y = torch.arange(24.0).reshape(8, 3), torch.arange(8) % 3


class Pairs(TorchDataset):
    """A map-style data set whose example 5 is what a test says."""

    def __init__(self, fifth: Any = None) -> None:
        self.fifth = fifth

    def __len__(self) -> int:
        return 8

    def __getitem__(self, row: int) -> Any:
        if row == 5 and self.fifth is not None:
            if isinstance(self.fifth, Exception):
                raise self.fifth
            return self.fifth
        return X[row], int(Y[row])


class Numbers(IterableDataset):
    def __iter__(self) -> Iterator[Any]:
        for row in range(8):
            yield {"input": X[row].requires_grad_(), "weight": row / 2}

    def __len__(self) -> int:
        return 8


def test_as_pytorchs_loader_gives_them() -> None:
    for data in (Pairs(), TensorDataset(X, Y), [(x, y) for x, y in zip(X, Y)]):
        made = Batches(data, 3, shuffle=False)
        for batch, (x, y) in zip(made, DataLoader(Pairs(), 3), strict=True):
            assert np.array_equal(batch["input"], x.numpy())
            assert np.array_equal(batch["label"], y.numpy())
    stream = as_dataset(Numbers())
    assert {name: str(field) for name, field in stream.fields.items()} == {"input": "float32[3]", "weight": "float32[]"}
    batches = Batches(stream, 3, seed=1, buffer=4)
    whole = list(batches)
    assert sorted(weight for batch in whole for weight in batch["weight"]) == [row / 2 for row in range(8)]
    batches.restore({**batches.state(), "epoch": 0, "batch": 1})
    assert all(np.array_equal(a["input"], b["input"]) for a, b in zip(batches, whole[1:], strict=True))
    named = Pairs()
    named.classes = ["cat", "dog", "ant"]  # type: ignore[attr-defined]
    assert as_dataset(named).fields["label"].classes == ("cat", "dog", "ant")
    picture = as_dataset([Image.new("RGB", (4, 5), (1, 2, 3))])
    assert str(picture.fields["input"]) == "uint8[5, 4, 3]"


@pytest.mark.parametrize(
    ("fifth", "message"),
    [
        (ValueError("boom"), "Pairs, example 5: ValueError: boom; mend it"),
        ((X[5, :2], 1), r"example 5: field 'input' is float32\[2\], but float32\[3\] in the first example; bring all"),
        ((X[5].double(), 1), r"example 5: field 'input' is float64\[3\]"),
        ({"input": X[5]}, "example 5: the fields input, but the first example has input, label"),
        ((X[5], "cat"), "example 5: field 'label' is str"),
        ((X[5], 1, 2), "example 5: 3 values; give a pair"),
    ],
)
def test_an_example_that_differs_is_named(fifth: Any, message: str) -> None:
    for data in (Pairs(fifth), _Iterated(Pairs(fifth))):
        with pytest.raises(DatasetError, match=message.replace("Pairs", "(Pairs|_Iterated)")):
            list(Batches(data, 4, shuffle=False))


class _Iterated:
    def __init__(self, data: Pairs) -> None:
        self.data = data

    def __iter__(self) -> Iterator[Any]:
        return (self.data[row] for row in range(8))


def test_what_is_no_data_set() -> None:
    for data, message in ((iter([1, 2]), "once only"), ([], "no examples"), (_Empty(), "no examples"), (7, "got int")):
        with pytest.raises(DatasetError, match=message):
            as_dataset(data)


class _Empty:
    def __iter__(self) -> Iterator[Any]:
        return iter(())


class _Features(dict):
    arrow_schema: pa.Schema


class Names:
    """ClassLabel."""

    names = ["cat", "dog"]


class HuggingFace:
    """What is used of `datasets.Dataset`, on a table; columns in `arrays` are what their features decode."""

    def __init__(self, table: pa.Table, arrays: dict[str, list[np.ndarray]], form: str = "") -> None:
        self.table, self.arrays, self.form = table, arrays, form
        self.features = _Features({name: Names() if name == "label" else None for name in table.column_names})
        self.features.arrow_schema = table.schema
        self.column_names = table.column_names

    def __len__(self) -> int:
        return len(self.table)

    def with_format(self, form: str) -> HuggingFace:
        return HuggingFace(self.table, self.arrays, form)

    def select_columns(self, names: list[str]) -> HuggingFace:
        return HuggingFace(self.table.select(names), self.arrays)

    def __getitem__(self, rows: Any) -> Any:
        if self.form == "arrow":
            return self.table.take(rows)
        many = rows if isinstance(rows, list) else [rows]
        taken = {name: [self.arrays[name][row] for row in many] for name in self.column_names}
        return taken if isinstance(rows, list) else {name: values[0] for name, values in taken.items()}


def hugging_face(label: list[int | None], pictures: list[np.ndarray]) -> HuggingFace:
    encoded = pa.array([{"bytes": b"", "path": ""}] * 4)
    table = pa.table({"label": label, "tokens": [[1], [1, 2], [], [4]], "picture": encoded})
    return HuggingFace(table, {"picture": pictures})


def test_hugging_face() -> None:
    pictures = [np.full((2, 2, 3), row, np.uint8) for row in range(4)]
    data = as_dataset(hugging_face([0, 1, 1, 0], pictures))
    assert data.fields["label"].classes == ("cat", "dog")
    assert str(data.fields["picture"]) == "uint8[2, 2, 3]"
    taken = data.take(np.array([3, 1]))
    assert taken["label"].tolist() == [0, 1]
    assert taken["tokens"].tolist() == [[4, 0], [1, 2]]
    assert taken["tokens_length"].tolist() == [1, 2]
    assert taken["picture"][:, 0, 0, 0].tolist() == [3, 1]
    assert len(list(Batches(data, 3))) == 2
    with pytest.raises(DatasetError, match="Hugging Face data set, row 2: column 'label': no value"):
        as_dataset(hugging_face([0, 1, None, 0], pictures)).take(np.array([3, 2]))
    with pytest.raises(DatasetError, match=r"row 2: column 'picture' is uint8\[1, 2, 3\], but uint8\[2, 2, 3\]"):
        as_dataset(hugging_face([0, 1, 1, 0], [*pictures[:2], pictures[2][:1], pictures[3]])).take(np.arange(4))
    with pytest.raises(DatasetError, match="column 'text' has texts; tokenize them, or leave"):
        as_dataset(HuggingFace(pa.table({"text": ["a"]}), {}))
