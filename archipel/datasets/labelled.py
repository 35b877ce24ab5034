"""Labelled examples in three parts: for training, for validation (choosing a model), for the reported test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from archipel.datasets.splits import seeded_order
from archipel.errors import DatasetError


@dataclass(frozen=True, eq=False)
class Labelled:
    """Inputs float32 [n, ...] and labels int64 [n], 0..classes-1; row i of both is one example. Read-only.

    Example: see `archipel.datasets.mnist`.
    """

    inputs: NDArray[np.float32]
    labels: NDArray[np.int64]

    def __post_init__(self) -> None:
        for array in (self.inputs, self.labels):
            array.flags.writeable = False

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: NDArray[np.intp]) -> Labelled:
        """The examples at these row numbers (integer [m]), in the order given."""
        return Labelled(self.inputs[rows], self.labels[rows])


@dataclass(frozen=True, eq=False)
class LabelledSplits:
    """A data set in three parts without a common example.

    train, validation  the data set's published training part, divided and ordered by a seed
    test               its published test part, the same for every seed
    classes            the names of labels 0, 1, ...

    Example: see `archipel.datasets.mnist`.
    """

    train: Labelled
    validation: Labelled
    test: Labelled
    classes: tuple[str, ...]


def draw_split(name: str, count: int, validation: int, seed: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Row numbers (train, validation) of `count` examples, in an order drawn from `name` and `seed`.

    Raises DatasetError if a part would be empty.
    """
    if not 1 <= validation < count:
        raise DatasetError(
            f"expected 1..{max(count - 1, 0)} validation examples of the {count} training examples of {name}, "
            f"got {validation}"
        )
    order = np.array(seeded_order(range(count), f"{name} {seed}"), np.intp)
    return order[validation:], order[:validation]


def scale_pixels(pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
    """uint8 pixels 0..255 as float32 in 0..1 of the same shape, which the networks in `archipel.models` take."""
    return pixels.astype(np.float32) / np.float32(255)


def check_labels(labels: NDArray[np.uint8], classes: Sequence[str], name: str, remedy: str) -> None:
    """Raises DatasetError if a label has no class."""
    if len(labels) and int(labels.max()) >= len(classes):
        raise DatasetError(f"{name}: expected labels 0..{len(classes) - 1}, it has {labels.max()}; {remedy}")
