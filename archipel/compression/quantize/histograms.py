"""Histograms that batches are added to, and clipping ranges from them."""

from __future__ import annotations

import numpy as np

BINS = 2048
_CANDIDATES = 100


class Histogram:
    """How often a value falls into each of BINS equal bins from `low` to `high`, and the mean of what fell there."""

    def __init__(self, low: float, high: float) -> None:
        self.low, self.high = low, high
        # With the sums a bin stands for the mean of its values, not for its middle: exact zeros stay zero.
        self._counts = np.zeros(BINS)
        self._sums = np.zeros(BINS)

    def add(self, values: np.ndarray) -> None:
        """Count an array of any shape; what is outside counts in the first or the last bin."""
        values = values.reshape(-1)
        width = self.high - self.low
        scaled = (values - np.float32(self.low)) * np.float32(BINS / width if width > 0 else 0.0)
        index = np.clip(scaled, 0, BINS - 1).astype(np.intp)
        self._counts += np.bincount(index, minlength=BINS)
        self._sums += np.bincount(index, weights=values, minlength=BINS)

    @property
    def points(self) -> tuple[np.ndarray, np.ndarray]:
        """The mean of each bin that is not empty, ascending, and its count."""
        used = self._counts > 0
        return self._sums[used] / self._counts[used], self._counts[used]

    def percentile(self, percent: float) -> tuple[float, float]:
        """The range that leaves out 100 - `percent` percent of the values at each end, to the width of a bin."""
        share = np.cumsum(self._counts) / max(self._counts.sum(), 1.0)
        edges = np.linspace(self.low, self.high, BINS + 1)
        low = edges[int(np.searchsorted(share, 1 - percent / 100, side="right"))]
        high = edges[min(int(np.searchsorted(share, percent / 100, side="left")), BINS - 1) + 1]
        return float(low), float(high)

    def magnitude_percentile(self, percent: float) -> float:
        """The magnitude that `percent` percent of the values do not exceed, to the width of a bin."""
        values, counts = self.points
        order = np.argsort(np.abs(values))
        share = np.cumsum(counts[order]) / max(counts.sum(), 1.0)
        place = min(int(np.searchsorted(share, percent / 100, side="left")), len(order) - 1)
        # The largest value of a bin lies above its mean.
        half = (self.high - self.low) / BINS / 2
        return min(float(np.abs(values[order[place]])) + half, max(-self.low, self.high))

    def least_error(self) -> tuple[float, float]:
        """The range with the least mean squared error of unsigned 8-bit rounding, searched one end at a time."""
        values, counts = self.points
        low, high = min(self.low, 0.0), max(self.high, 0.0)
        shares = np.linspace(1.0, 0.01, _CANDIDATES)
        # Twice, as the best high end depends on the low end.
        for _ in range(2):
            errors = [_error(values, counts, low, high * share) for share in shares]
            high *= shares[int(np.argmin(errors))]
            if low < 0:
                errors = [_error(values, counts, low * share, high) for share in shares]
                low *= shares[int(np.argmin(errors))]
        return low, high

    def least_error_magnitude(self) -> float:
        """As `least_error`, for symmetric signed rounding: the largest magnitude of the range."""
        values, counts = self.points
        largest = max(-self.low, self.high)
        shares = np.linspace(1.0, 0.01, _CANDIDATES)
        errors = [_symmetric_error(values, counts, largest * share) for share in shares]
        return float(largest * shares[int(np.argmin(errors))])


def unsigned_grid(low: float, high: float) -> tuple[float, int]:
    """Scale and zero point of uint8 for a range with 0 in it, which gets an integer of its own."""
    scale = (high - low) / 255.0
    # Of zeros alone: any scale will do, and float32 could not divide by this one.
    if scale < 1e-30:
        return 1.0, 0
    return scale, round(-low / scale)


def signed_grid(low: float, high: float) -> tuple[float, int]:
    """Scale of symmetric int8; its zero point is 0."""
    scale = max(-low, high) / 127.0
    return (scale if scale > 1e-30 else 1.0), 0


def _error(values: np.ndarray, counts: np.ndarray, low: float, high: float) -> float:
    scale, zero = unsigned_grid(low, high)
    rounded = (np.clip(np.round(values / scale) + zero, 0, 255) - zero) * scale
    return float(counts @ np.square(values - rounded))


def _symmetric_error(values: np.ndarray, counts: np.ndarray, largest: float) -> float:
    scale, _ = signed_grid(-largest, largest)
    rounded = np.clip(np.round(values / scale), -128, 127) * scale
    return float(counts @ np.square(values - rounded))
