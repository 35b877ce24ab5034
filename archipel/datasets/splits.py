"""Who learns in the cloud, who is a device, who is only measured: splits by writer, never by digit.

An order is drawn by sorting on SHA-256 of the seed and the item, so that a split is the same under every version of
NumPy, and more devices are the same devices and some more.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from archipel.datasets.digits import PUPIL_SERIES, STAFF_SERIES, DigitsByWriter
from archipel.errors import DatasetError


@dataclass(frozen=True)
class WriterSplit:
    """Four groups of writers without a common member."""

    cloud_train: tuple[int, ...]  # census staff
    cloud_validation: tuple[int, ...]  # other census staff
    devices: tuple[int, ...]  # pupils
    held_out: tuple[int, ...]  # all other pupils


def split_writers(digits: DigitsByWriter, *, devices: int, seed: int, validation: float = 0.2) -> WriterSplit:
    """Divide the staff into training and validation for the cloud, the pupils into devices and held-out writers.

    `validation` is the share of the staff. Raises DatasetError if a group would be empty.
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

    Each class is divided by the share `test`, classes taken in turn, so that both sides see what there is of each.
    Raises DatasetError if the writer is not in the data or a side would be empty.
    """
    own = digits.of([writer])
    order = seeded_order(range(len(own)), f"digits {seed} {writer}")
    # A stable sort by class of a shuffled order, cut at even steps, spreads the test share over the classes.
    by_class = np.array(sorted(order, key=lambda row: int(own.labels[row])), dtype=np.intp)
    steps = np.floor(np.arange(len(own) + 1) * test)
    is_test = np.diff(steps) > 0
    if not 0 < is_test.sum() < len(own):
        raise DatasetError(
            f"a test share of {test} of the {len(own)} digits of writer {writer} leaves a side empty; "
            "choose another share or another writer"
        )
    return own.take(np.sort(by_class[~is_test])), own.take(np.sort(by_class[is_test]))


def seeded_order(items: Iterable[int], purpose: str) -> list[int]:
    """The items in an order that depends on nothing but them and `purpose`."""
    return sorted(items, key=lambda item: hashlib.sha256(f"{purpose} {item}".encode()).digest())
