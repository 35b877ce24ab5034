"""Examples of different lengths, and how they become one array."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

LENGTH = "_length"
"""What follows a field's name in the name of the field with the lengths of its examples."""


@dataclass(frozen=True)
class Ragged:
    """Example i is `values[offsets[i]:offsets[i + 1]]`: values `[total, ...]`, offsets int64 `[examples + 1]`."""

    values: NDArray[Any]
    offsets: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> NDArray[np.int64]:
        """The length of each example."""
        return np.diff(self.offsets)

    def __getitem__(self, rows: NDArray[np.intp]) -> list[NDArray[Any]]:
        """The examples of these numbers, as views."""
        return [self.values[self.offsets[row] : self.offsets[row + 1]] for row in rows]


def stack(examples: Sequence[NDArray[Any]], rank: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Examples `[...]` with `rank` axes as one array `[examples, ...]`, the shorter ones filled up with zeros."""
    longest = [max((example.shape[axis] for example in examples), default=0) for axis in range(rank)]
    made = np.zeros((len(examples), *longest), dtype)
    for place, example in enumerate(examples):
        inside: tuple[Any, ...] = (place, *(slice(size) for size in example.shape))
        made[inside] = example
    return made
