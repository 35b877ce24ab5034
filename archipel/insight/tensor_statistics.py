"""Mean, deviation, extremes, zeros and a histogram of a tensor, block by block, so that a large one takes no memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from archipel.insight.limits import BINS
from archipel.insight.page_data import TensorStatistics

_BLOCK = 1 << 20
_SMALL = 12
"""Tensors of so many numbers or fewer are shown number by number."""


def describe(array: NDArray[Any], bins: int = 0) -> TensorStatistics:
    """The statistics of all numbers of an array, of any shape and dtype (bool counts as 0 and 1).

    Arguments:
        array: numbers; of others (texts, complex numbers) only the count is told.
        bins: bars of the histogram, equally wide from the least number to the largest; 0: more for more numbers, up to
            BINS.

    Numbers that are not finite are counted, and left out of everything else. Deviation is the population's.
    """
    flat = array.reshape(-1)
    # bfloat16 and the like have kind V; they convert, where structured and other void types have fields or do not.
    if array.dtype.kind in "OSUcmMT" or array.dtype.fields is not None:
        return TensorStatistics(count=flat.size)
    bins = bins or min(BINS, max(8, 2 * math.isqrt(flat.size)))
    found = TensorStatistics(count=flat.size)
    if 0 < flat.size <= _SMALL:
        found.sample = [f"{number:.6g}" for number in flat.astype(np.float64).tolist()]
    zeros = finite = 0
    total = 0.0
    low, high = math.inf, -math.inf
    for block in _blocks(flat):
        good = block[np.isfinite(block)]
        finite += good.size
        zeros += int(good.size - np.count_nonzero(good))
        if good.size:
            total += float(good.sum())
            low, high = min(low, float(good.min())), max(high, float(good.max()))
    found.odd = flat.size - finite
    if not finite:
        return found
    mean = total / finite
    squares = 0.0
    counts = np.zeros(bins, np.int64)
    # With one number alone a bin around it, as NumPy has it.
    edges = (low - 0.5, high + 0.5) if low == high else (low, high)
    # Numbers may be too far apart for a width, or so close together that no bin lies between them.
    width = (edges[1] - edges[0]) / bins
    drawable = math.isfinite(width) and np.spacing(max(map(abs, edges))) < width
    for block in _blocks(flat):
        good = block[np.isfinite(block)]
        with np.errstate(over="ignore"):
            squares += float(np.square(good - mean).sum())
        if drawable:
            counts += np.histogram(good, bins, edges)[0]
    found.mean, found.deviation = _finite(mean), _finite(math.sqrt(squares / finite))
    found.low, found.high, found.zeros = low, high, zeros / finite
    found.counts = counts.tolist() if counts.any() else []
    return found


class Describer:
    """`describe`, once for each array: several graphs of a bundle read the same weights."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[NDArray[Any], TensorStatistics]] = {}

    def __call__(self, array: NDArray[Any]) -> TensorStatistics:
        """The statistics of an array, which is kept, so that its identity stays its own."""
        if id(array) not in self._known:
            self._known[id(array)] = (array, describe(array))
        return self._known[id(array)][1]


def _blocks(flat: NDArray[Any]) -> Iterator[NDArray[np.float64]]:
    for begin in range(0, flat.size, _BLOCK):
        yield flat[begin : begin + _BLOCK].astype(np.float64)


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None
