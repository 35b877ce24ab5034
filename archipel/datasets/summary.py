"""What a data set has: number of examples, mean, deviation, range, missing values, classes; a piece at a time.

Means and sums of squares of the pieces are merged as Chan, Golub and LeVeque 1979 do ("Updating Formulae and a Pairwise
Algorithm for Computing Sample Variances"), in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from archipel.datasets.dataset import Field
from archipel.datasets.opening import as_dataset
from archipel.datasets.order import count_of
from archipel.datasets.ragged import LENGTH
from archipel.datasets.taking import pieces_of, rows_a_piece

MOST_CLASSES = 1000
_MOST_FEATURES = 1024
_MOST_CHANNELS = 64


class FieldSummary(msgspec.Struct, frozen=True):
    """What one field has.

    dtype, shape      of one example; null for an axis of any size
    values            how many numbers it has in all, without those that fill shorter examples up
    missing           how many of them are NaN
    infinite          how many are infinite
    mean, std         of the finite ones, std with division by their number; null where there are none
    low, high         the smallest and the largest finite one
    means, stds       the same for each feature (`[features]` of floats) or channel (the last of several axes, at most
                      64); empty elsewhere
    classes           how often each label comes, by its name or number, for fields with names of classes and for whole
                      numbers without axes; empty where there are more than 1000 without names
    histogram         how many finite numbers lie in each of equal parts of low ... high; empty if not asked for
    """

    dtype: str
    shape: list[int | None]
    values: int
    missing: int
    infinite: int
    mean: float | None
    std: float | None
    low: float | None
    high: float | None
    means: list[float]
    stds: list[float]
    classes: dict[str, int]
    histogram: list[int]


class Summary(msgspec.Struct, frozen=True):
    """What a data set has: how many examples, their bytes in memory, and each field.

    Example: see `archipel.datasets.summarize`.
    """

    examples: int
    bytes: int
    fields: dict[str, FieldSummary]


def summarize(data: object, *, bins: int = 0, progress: Callable[[int], None] | None = None) -> Summary:
    """Read all examples once, with `bins` twice, and say what they have.

    Arguments:
        data: anything that `as_dataset` takes.
        bins: the number of parts of each histogram.
        progress: called with the number of examples read so far.

    Raises DatasetError for examples that cannot be read.

    Example:
        summary = summarize({"input": x, "label": y})
        summary.fields["input"].means, summary.fields["label"].classes
    """
    dataset = as_dataset(data)
    running = {name: _Running(field) for name, field in dataset.fields.items()}
    rows, examples, size = rows_a_piece(dataset.fields), 0, 0
    for piece in pieces_of(dataset, rows):
        for name, each in running.items():
            size += each.add(piece[name], piece.get(name + LENGTH))
        examples += count_of(piece)
        if progress:
            progress(examples)
    if bins:
        for piece in pieces_of(dataset, rows):
            for name, each in running.items():
                each.count_in_bins(piece[name], piece.get(name + LENGTH), bins)
    return Summary(examples, size, {name: each.result() for name, each in running.items()})


class _Running:
    def __init__(self, field: Field) -> None:
        self.field = field
        rank, last = len(field.shape), field.shape[-1] if field.shape else None
        features = rank == 1 and field.dtype.kind == "f" and last is not None and last <= _MOST_FEATURES
        channels = rank > 1 and last is not None and last <= _MOST_CHANNELS
        self.columns = int(last or 1) if features or channels else 1
        self.counts = np.zeros(self.columns)
        self.means, self.squares = np.zeros(self.columns), np.zeros(self.columns)
        self.low, self.high = np.inf, -np.inf
        self.values = self.missing = self.infinite = 0
        self.classes: dict[int, int] | None = (
            {} if field.dtype.kind in "iub" and (field.classes or not field.shape) else None
        )
        self.histogram: NDArray[np.int64] = np.zeros(0, np.int64)

    def add(self, array: NDArray[Any], lengths: NDArray[np.int64] | None) -> int:
        """Take a piece in. Returns its bytes."""
        given = _without_filling(array, lengths)
        x = given.reshape(-1, self.columns).astype(np.float64)
        good = np.isfinite(x)
        self.values += x.size
        self.missing += int(np.isnan(x).sum())
        self.infinite += int(np.isinf(x).sum())
        whole = bool(good.all())
        counts = good.sum(axis=0).astype(np.float64)
        safe = x if whole else np.where(good, x, 0)
        means = safe.sum(axis=0) / np.maximum(counts, 1)
        apart = safe - means if whole else np.where(good, x - means, 0)
        self._merge(counts, means, (apart * apart).sum(axis=0))
        if counts.any():
            finite = x if whole else x[good]
            self.low, self.high = min(self.low, float(finite.min())), max(self.high, float(finite.max()))
        if self.classes is not None:
            labels, times = np.unique(given, return_counts=True)
            for label, count in zip(labels.tolist(), times.tolist()):
                self.classes[int(label)] = self.classes.get(int(label), 0) + count
            if len(self.classes) > max(MOST_CLASSES, len(self.field.classes)):
                self.classes = None
        return given.nbytes

    def count_in_bins(self, array: NDArray[Any], lengths: NDArray[np.int64] | None, bins: int) -> None:
        """Count the numbers of a piece, when the range of all is known."""
        if not self.counts.any():
            return
        x = _without_filling(array, lengths).astype(np.float64).reshape(-1)
        counted, _ = np.histogram(x[np.isfinite(x)], bins, (self.low, self.high))
        self.histogram = counted if not len(self.histogram) else self.histogram + counted

    def result(self) -> FieldSummary:
        """What was taken in."""
        stds = np.sqrt(self.squares / np.maximum(self.counts, 1))
        single = self.columns > 1
        each = (self.means.tolist(), stds.tolist()) if single else ([], [])
        # Of all columns together, by the same formula.
        total, mean, squares = 0.0, 0.0, 0.0
        for count, own, square in zip(self.counts.tolist(), self.means.tolist(), self.squares.tolist()):
            total, mean, squares = _merged(total, mean, squares, count, own, square)
        some = total > 0
        names = self.field.classes
        counted = self.classes or {}
        if names:
            counted = {**dict.fromkeys(range(len(names)), 0), **counted}
        return FieldSummary(
            dtype=self.field.dtype.name,
            shape=list(self.field.shape),
            values=self.values,
            missing=self.missing,
            infinite=self.infinite,
            mean=mean if some else None,
            std=float(np.sqrt(squares / total)) if some else None,
            low=self.low if some else None,
            high=self.high if some else None,
            means=each[0],
            stds=each[1],
            classes={_name(label, names): count for label, count in sorted(counted.items())},
            histogram=self.histogram.tolist(),
        )

    def _merge(self, counts: NDArray[np.float64], means: NDArray[np.float64], squares: NDArray[np.float64]) -> None:
        total = self.counts + counts
        delta = means - self.means
        share = counts / np.maximum(total, 1)
        self.squares += squares + delta * delta * self.counts * share
        self.means += delta * share
        self.counts = total


def _merged(
    count: float, mean: float, squares: float, more: float, other: float, other_squares: float
) -> tuple[float, float, float]:
    total = count + more
    if not total:
        return count, mean, squares
    delta = other - mean
    return total, mean + delta * more / total, squares + other_squares + delta * delta * count * more / total


def _without_filling(array: NDArray[Any], lengths: NDArray[np.int64] | None) -> NDArray[Any]:
    if lengths is None:
        return array
    return array[np.arange(array.shape[1]) < lengths[:, None]]


def _name(label: int, names: tuple[str, ...]) -> str:
    return names[label] if 0 <= label < len(names) else str(label)
