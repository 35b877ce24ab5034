"""Which share of a weight's largest magnitude its integers should span, so that rounding loses least."""

from __future__ import annotations

import numpy as np

SHARES = np.linspace(1.0, 0.4, 61)


def best_shares(rows: np.ndarray, levels: int, least: int | None = None) -> np.ndarray:
    """For each of `rows`, [n, elements], the share of max |row| with the least squared error of rounding, [n].

    Integers go from `least` (by default -levels - 1) to `levels`. The graph multiplies the scale with the share, so
    that the scale follows the weight in training.
    """
    lowest = -levels - 1 if least is None else least
    largest = np.abs(rows).max(axis=1, keepdims=True)
    # A larger share comes first and wins ties.
    best, error = np.ones(len(rows)), np.full(len(rows), np.inf)
    for share in SHARES:
        scale = np.where(largest > 0, largest * share / levels, 1.0)
        rounded = np.clip(np.round(rows / scale), lowest, levels) * scale
        candidate_error = np.square(rows - rounded).sum(axis=1)
        better = candidate_error < error
        best[better], error[better] = share, candidate_error[better]
    return best


def as_rows(weight: np.ndarray, axis: int | None) -> np.ndarray:
    """A weight as one row for each scale: along `axis`, or all of it."""
    return weight.reshape(1, -1) if axis is None else np.moveaxis(weight, axis, 0).reshape(weight.shape[axis], -1)
