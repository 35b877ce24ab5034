from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from archipel.datasets import DigitsByWriter, digits_by_writer, split_own_digits, split_writers
from archipel.errors import DatasetError


@pytest.fixture(scope="module")
def digits() -> DigitsByWriter:
    return digits_by_writer()


def few_digits(counts: dict[tuple[int, int], int]) -> DigitsByWriter:
    """Blank digits: {(writer, series): how many}, labels 0, 1, 2, ..."""
    writers = np.repeat([writer for writer, _ in counts], list(counts.values())).astype(np.int16)
    series = np.repeat([series for _, series in counts], list(counts.values())).astype(np.uint8)
    labels = np.concatenate([np.arange(count) % 10 for count in counts.values()]).astype(np.uint8)
    return DigitsByWriter(np.zeros((len(labels), 28, 28), np.uint8), labels, writers, series)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_groups_are_disjoint_and_cover_everyone(digits: DigitsByWriter, seed: int) -> None:
    split = split_writers(digits, devices=32, seed=seed)
    groups = [split.cloud_train, split.cloud_validation, split.devices, split.held_out]
    assert [len(group) for group in groups] == [66, 16, 32, 130]
    assert len({writer for group in groups for writer in group}) == 244
    assert set(split.cloud_train + split.cloud_validation) == set(digits.writers_in((0, 1)))
    assert set(split.devices + split.held_out) == set(digits.writers_in((4,)))


def test_same_seed_same_split_and_more_devices_keep_the_first(digits: DigitsByWriter) -> None:
    few, many = (split_writers(digits, devices=devices, seed=7) for devices in (24, 40))
    assert split_writers(digits, devices=24, seed=7) == few
    assert many.devices[:24] == few.devices
    assert many.cloud_train == few.cloud_train
    assert split_writers(digits, devices=24, seed=8).devices != few.devices


def test_the_split_does_not_move_between_releases() -> None:
    # Worked out with sha256sum: `printf 'pupils 5 2100' | sha256sum` and so on, sorted.
    digits = few_digits({(1, 0): 1, (2, 0): 1, (2100, 4): 1, (2101, 4): 1, (2102, 4): 1})
    split = split_writers(digits, devices=2, seed=5, validation=0.5)
    assert split.devices == (2102, 2100)
    assert split.cloud_validation == (2,)


@pytest.mark.parametrize("devices", [0, -1, 162, 500])
def test_impossible_numbers_of_devices(digits: DigitsByWriter, devices: int) -> None:
    with pytest.raises(DatasetError, match=rf"expected 1\.\.161 devices, got {devices}"):
        split_writers(digits, devices=devices, seed=0)


@pytest.mark.parametrize("validation", [0.0, 0.001, 1.0])
def test_impossible_validation_shares(digits: DigitsByWriter, validation: float) -> None:
    with pytest.raises(DatasetError, match="validation share"):
        split_writers(digits, devices=24, seed=0, validation=validation)


@settings(max_examples=60)
@given(st.integers(2, 40), st.integers(0, 5), st.floats(0.2, 0.8))
def test_own_digits_are_divided_without_loss(count: int, seed: int, test: float) -> None:
    digits = few_digits({(2100, 4): count, (2101, 4): 3})
    numbered = digits.images.copy()
    numbered[:, 0, 0] = np.arange(len(digits))
    digits = DigitsByWriter(numbered, digits.labels, digits.writers, digits.series)
    if int(count * test) == 0:
        with pytest.raises(DatasetError, match="leaves a side empty"):
            split_own_digits(digits, 2100, seed=seed, test=test)
        return
    train, held = split_own_digits(digits, 2100, seed=seed, test=test)
    rows = train.images[:, 0, 0].tolist() + held.images[:, 0, 0].tolist()
    assert sorted(rows) == list(range(count))
    assert len(held) == int(count * test)


def test_own_digits_keep_every_class_on_both_sides(digits: DigitsByWriter) -> None:
    writer = digits.writers_in((4,))[10]
    train, held = split_own_digits(digits, writer, seed=0)
    own = np.bincount(digits.of([writer]).labels, minlength=10)
    difference = np.bincount(train.labels, minlength=10) - np.bincount(held.labels, minlength=10)
    assert np.all(np.abs(difference) <= np.where(own % 2, 1, 2))
    assert set(train.writers.tolist()) == set(held.writers.tolist()) == {writer}
    again = split_own_digits(digits, writer, seed=0)
    np.testing.assert_array_equal(again[0].images, train.images)
    other = split_own_digits(digits, writer, seed=1)
    assert not np.array_equal(other[0].images, train.images)
