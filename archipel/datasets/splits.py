"""Splits the digits by writer, never by digit: writers for the cloud, writers as devices, writers held out.

An order is drawn by sorting on SHA-256 of the seed and the item. So a split is the same under every version of NumPy,
and a split with more devices keeps those of a split with fewer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from archipel.datasets.published.digits import PUPIL_SERIES, STAFF_SERIES, DigitsByWriter
from archipel.errors import DatasetError


@dataclass(frozen=True)
class WriterSplit:
    """Four disjoint groups of writers, by NIST's numbers.

    cloud_train, cloud_validation  census staff
    devices, held_out              pupils: one for each device, and all others

    Example: see `archipel.datasets.split_writers`.
    """

    cloud_train: tuple[int, ...]
    cloud_validation: tuple[int, ...]
    devices: tuple[int, ...]
    held_out: tuple[int, ...]


def split_writers(digits: DigitsByWriter, *, devices: int, seed: int, validation: float = 0.2) -> WriterSplit:
    """Divide the staff into training and validation for the cloud, the pupils into devices and held-out writers.

    Arguments:
        digits: data with both series of writers.
        devices: the number of pupils that are devices; the others are held out.
        seed: determines the split.
        validation: the share of the staff for validation, above 0 and below 1.

    Returns the four groups.

    Raises DatasetError if a group would be empty.

    Example:
        split = split_writers(digits_by_writer(), devices=20, seed=0)
        print(len(split.devices), len(split.held_out))
    """
    staff = seeded_order(digits.writers_in(STAFF_SERIES), f"staff {seed}")
    pupils = seeded_order(digits.writers_in(PUPIL_SERIES), f"pupils {seed}")
    if not 1 <= devices < len(pupils):
        raise DatasetError(
            f"expected 1..{max(len(pupils) - 1, 0)} devices, got {devices}: "
            f"the data have {len(pupils)} pupils and one at least must be held out"
        )
    cut = round(len(staff) * validation)
    if not 1 <= cut < len(staff):
        raise DatasetError(
            f"a validation share of {validation} of {len(staff)} staff leaves a group without a writer; "
            "choose another share"
        )
    return WriterSplit(
        cloud_train=tuple(staff[cut:]),
        cloud_validation=tuple(staff[:cut]),
        devices=tuple(pupils[:devices]),
        held_out=tuple(pupils[devices:]),
    )


def split_own_digits(
    digits: DigitsByWriter, writer: int, *, seed: int, test: float = 0.5
) -> tuple[DigitsByWriter, DigitsByWriter]:
    """One writer's digits as (train, test), for what a device learns for its owner alone.

    The share `test` is spread over the classes, so that both parts have digits of each class that has enough. Raises
    DatasetError if the writer is not in the data or a part would be empty.

    Example:
        digits = digits_by_writer()
        train, test = split_own_digits(digits, int(digits.writers[0]), seed=0)
    """
    own = digits.of([writer])
    order = seeded_order(range(len(own)), f"digits {seed} {writer}")
    # A stable sort by class of a shuffled order, cut at even steps, spreads the test share over the classes.
    by_class = np.array(sorted(order, key=lambda row: int(own.labels[row])), dtype=np.intp)
    # Row i goes to the test part where floor(i * test) increases: a share of `test` in every run of rows.
    steps = np.floor(np.arange(len(own) + 1) * test)
    is_test = np.diff(steps) > 0
    if not 0 < is_test.sum() < len(own):
        raise DatasetError(
            f"a test share of {test} of the {len(own)} digits of writer {writer} leaves a side empty; "
            "choose another share or another writer"
        )
    return own.take(np.sort(by_class[~is_test])), own.take(np.sort(by_class[is_test]))


def seeded_order(items: Iterable[int], purpose: str) -> list[int]:
    """The items in an order that depends only on them and on `purpose`."""
    return sorted(items, key=lambda item: hashlib.sha256(f"{purpose} {item}".encode()).digest())
