"""Which examples a store lacks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from archipel.lite_runtime.store.duplicates import lacking
from archipel.lite_runtime.store.example_store import ExampleStore


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ExampleStore]:
    with ExampleStore.open(tmp_path / "store", bytes(32)) as made:
        yield made


def examples(*numbers: float) -> dict[str, np.ndarray]:
    x = np.array(numbers, np.float32)
    return {"x": np.stack([x, -x], axis=1), "y": np.arange(len(x)) * 0 + 7}


def test_what_the_store_holds_is_not_lacking(store: ExampleStore) -> None:
    data = examples(*range(600))
    np.testing.assert_array_equal(lacking(store, data), np.arange(600))
    store.add_many(data)
    assert lacking(store, data).size == 0
    np.testing.assert_array_equal(lacking(store, examples(599, 600, 0, 1.5)), [1, 3])
    # One field differs.
    np.testing.assert_array_equal(lacking(store, {**examples(1, 2), "y": np.array([7, 8])}), [1])


def test_equal_examples_of_one_file_stay_as_many_as_they_are(store: ExampleStore) -> None:
    data = examples(1, 1, 2, np.nan)
    np.testing.assert_array_equal(lacking(store, data), [0, 1, 2, 3])
    store.add_many(data)
    assert lacking(store, data).size == 0
    np.testing.assert_array_equal(lacking(store, examples(1, 1, 1, np.nan, np.nan)), [2, 4])


def test_examples_of_another_layout_are_all_lacking(store: ExampleStore) -> None:
    store.add_many(examples(1, 2))
    np.testing.assert_array_equal(lacking(store, {"x": np.zeros((3, 2))}), [0, 1, 2])
