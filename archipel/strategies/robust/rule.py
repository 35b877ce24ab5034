"""What a robust rule is: one aggregate of n updates, of which up to f are arbitrary.

Rules are NumPy in float64, read and write no files, and draw nothing. They take each update as one row and never look
at who sent it, so the order of the rows does not matter, except for equal scores of Krum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from archipel.errors import PolicyError

Rows = NDArray[np.float64]
"""`[n, d]`: the updates."""
Row = NDArray[np.float64]
"""`[d]`."""
State = Mapping[str, Row]
"""What a rule keeps from round to round, `[d]` by name; {} at first. `ROOT` is the caller's, see FLTrust."""

ROOT = "root"

Aggregate = Callable[[Rows, int, State], tuple[Row, dict[str, Row]]]
"""updates, f, state -> the aggregate and the next state."""


@dataclass(frozen=True)
class Rule:
    """A robust rule.

    Arguments:
        name: in settings and on the command line.
        aggregate: the function; it may count on what `check` has checked, and changes none of its arguments.
        least: f -> the fewest updates for which the rule has its guarantee.
    """

    name: str
    aggregate: Aggregate
    least: Callable[[int], int]

    def __call__(self, updates: Rows, tolerated: int, state: State) -> tuple[Row, dict[str, Row]]:
        """The aggregate of the updates, and the next state.

        Arguments:
            updates: float64 `[n, d]`, finite.
            tolerated: f, how many of them may be arbitrary, 0 or more.
            state: as the last round's call returned it; {} in the first.

        Returns float64 `[d]`, on the scale of one update, and the state to keep.

        Raises PolicyError for too few updates, and where the rule misses what it needs.
        """
        check(self.name, updates, tolerated, self.least(tolerated))
        return self.aggregate(updates, tolerated, state)


@dataclass(frozen=True)
class Mixer:
    """What is done to updates before a rule: (updates, f, order) -> other updates, at most as many.

    `order` is a permutation of the rows, which bucketing draws its buckets by.
    """

    name: str
    mix: Callable[[Rows, int, NDArray[np.int64]], Rows]

    def __call__(self, updates: Rows, tolerated: int, order: NDArray[np.int64]) -> Rows:
        """The mixed updates, float64 `[m, d]` with m <= n, of which at most `tolerated` are arbitrary.

        Raises PolicyError for too few updates.
        """
        check(self.name, updates, tolerated, 2 * tolerated + 1)
        return self.mix(updates, tolerated, order)


def check(name: str, updates: Rows, tolerated: int, least: int) -> None:
    """Raises PolicyError unless there are enough updates for f, float64 `[n, d]`."""
    if updates.ndim != 2 or updates.dtype != np.float64:
        raise PolicyError(f"{name}: expected float64 [n, d], got {updates.dtype}{list(updates.shape)}")
    if tolerated < 0:
        raise PolicyError(f"{name}: tolerated is {tolerated}, expected 0 or more")
    if len(updates) < max(least, 1):
        raise PolicyError(
            f"{name}: {len(updates)} updates are too few to tolerate {tolerated}; it needs {max(least, 1)} or more"
        )


def norms(updates: Rows) -> NDArray[np.float64]:
    """The L2 norm of each row, `[n]`."""
    return np.asarray(np.sqrt(np.einsum("ij,ij->i", updates, updates)))


def clipped_mean(updates: Rows, bound: float) -> Row:
    """The mean of the rows, each shortened to an L2 norm of at most `bound`."""
    lengths = norms(updates)
    # bound / length where that is below 1, without dividing by 0.
    factors = bound / np.maximum(lengths, max(bound, float(np.finfo(np.float64).tiny)))
    return np.asarray(factors @ updates / len(updates))


def squared_distances(updates: Rows) -> NDArray[np.float64]:
    """Of each row to each other one, `[n, n]`."""
    # Products of rows instead of differences of each pair: n^2 d in one matrix product. Around the median row, because
    # the differences of large numbers would lose what the distance of two honest updates is.
    centred = updates - np.median(updates, axis=0)
    products = centred @ centred.T
    squares = np.diagonal(products)
    distances = np.maximum(squares[:, None] + squares[None, :] - 2.0 * products, 0.0)
    np.fill_diagonal(distances, 0.0)
    # Exactly symmetric, so that no result depends on the order of the rows.
    return np.asarray((distances + distances.T) / 2.0)


def majority(tolerated: int) -> int:
    """The fewest updates of which those that may be arbitrary are fewer than half."""
    return 2 * tolerated + 1
