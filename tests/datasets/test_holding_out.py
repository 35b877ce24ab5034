from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from archipel.datasets import hold_out, open_parquet, write_records
from archipel.errors import DatasetError
from tests.datasets.test_batches import Counting


@settings(max_examples=60)
@given(count=st.integers(2, 200), share=st.floats(0.01, 0.99), seed=st.integers(0, 2**32 - 1))
def test_each_example_is_in_one_part(count: int, share: float, seed: int) -> None:
    train, held = hold_out({"x": np.arange(count)}, share, seed=seed)
    both = [part.take(np.arange(len(part)))["x"].tolist() for part in (train, held)]
    assert sorted(both[0] + both[1]) == list(range(count))
    assert both == [sorted(part) for part in both]
    assert len(held) == min(max(round(count * share), 1), count - 1)


def test_each_class_has_its_share(tmp_path: Path) -> None:
    labels = np.repeat([0, 1, 2, 3], [100, 50, 10, 1])
    write_records({"label": labels}, tmp_path / "t.parquet", group_bytes=80)
    train, held = hold_out(tmp_path / "t.parquet", 0.2, seed=1, by="label")
    counts = [Counter(part.take(np.arange(len(part)))["label"].tolist()) for part in (train, held)]
    assert counts == [{0: 80, 1: 40, 2: 8, 3: 1}, {0: 20, 1: 10, 2: 2}]
    # Reading stays by row groups.
    assert len(train.blocks) == len(open_parquet(tmp_path / "t.parquet").blocks)
    other = hold_out(tmp_path / "t.parquet", 0.2, seed=2, by="label")[1]
    assert not np.array_equal(other.rows, held.rows)


def test_any_example_may_be_held_out() -> None:
    times = np.zeros(20)
    for seed in range(1000):
        times[hold_out({"x": np.arange(20)}, 0.25, seed=seed)[1].rows] += 1
    # Each is held out 250 times on average; a deviation of 5.5 standard deviations has a probability of 4e-8.
    assert np.abs(times - 250).max() < 5.5 * np.sqrt(1000 * 0.25 * 0.75)


def test_what_cannot_be_divided() -> None:
    for data, options, message in (
        (Counting(9), {}, "a stream cannot be divided"),
        ({"x": [1, 2]}, {"share": 1}, "share must be above 0 and below 1"),
        ({"x": [1]}, {}, "1 examples are too few"),
        ({"x": [1, 2]}, {"by": "x", "share": 0.5}, "2 examples are too few"),
        ({"x": [1, 2]}, {"by": "y"}, "field 'y' is missing"),
        ({"x": [1.5, 2]}, {"by": "x"}, r"field 'x' is float64\[\]; expected labels"),
    ):
        with pytest.raises(DatasetError, match=message):
            hold_out(data, **options)
