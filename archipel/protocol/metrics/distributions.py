"""Distributions of a metric over devices: from the devices' values, or from counts of devices in bins.

A device counts itself in the bin that its value lies in, so the sum over devices is a histogram and says nothing else.
Every figure here (mean, quantiles, the worst tenth) does not fall when one of the values rises. So it lies between the
figure of all devices at the lower edges of their bins and that of all at the upper edges: the middle of these two is
the estimate, and half their difference the largest error that it can have.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from archipel.protocol.messages.distributions import Bins
from archipel.protocol.metrics.measures import PREDICT_MS
from archipel.protocol.operator.results import Distribution, Estimate

LEAST_COUNTED = 10
"""Counts of fewer devices are not asked for: each bin would tell what one of a handful has, and the worst tenth would
be a single device."""
DECILES = tuple(tenth / 10 for tenth in range(1, 10))
WORST_SHARE = 0.1
_LOSS = "loss"
_LOSS_RANGE = 1e5
"""The default bins of a loss go from its range down to this part of it."""

Values = NDArray[np.float64]


def default_bins(name: str, bound: float | None = None) -> Bins:
    """Bins for a metric of this name whose absolute value is at most `bound`: 40 of a log scale for a loss or a time,
    of which each is a third wider than the one before, else 20 from 0 on. None: 100 for a loss or a time, else 1."""
    if name in (_LOSS, PREDICT_MS) or name.endswith(("_" + _LOSS, " " + _LOSS)):
        high = 100.0 if bound is None else bound
        return Bins(low=high / _LOSS_RANGE, high=high, count=40, scale="log", better="lower")
    return Bins(low=0.0, high=1.0 if bound is None else bound)


def place(bins: Bins, value: float) -> int:
    """Where `Distribution.counts` has a device with this value, a finite number: 0 ... bins.count + 1."""
    return int(_places(bins, np.array([value]))[0])


def one_hot(bins: Bins, value: float | None) -> NDArray[np.float32]:
    """What a device with this value adds to the counts: float32 `[bins.count + 2]`; None: nothing."""
    counts = np.zeros(bins.count + 2, np.float32)
    if value is not None:
        counts[place(bins, value)] = 1
    return counts


def distribution_of(values: Sequence[float] | Values, bins: Bins) -> Distribution:
    """The exact distribution of the devices' values, finite numbers, of which there is at least one."""
    array = np.asarray(values, np.float64)
    counts = np.bincount(_places(bins, array), minlength=bins.count + 2)

    def exactly(figure: Callable[[Values], float]) -> Estimate:
        return Estimate(value=figure(array))

    return _describe(exactly, bins, counts)


def distribution_from_counts(bins: Bins, counts: NDArray[np.integer]) -> Distribution:
    """The distribution of devices of which only this is known: whole numbers `[bins.count + 2]`, with a sum above 0."""
    edges = bins.edges()
    # A loss is never below 0; how far a device is beyond other ends nobody knows.
    least = 0.0 if bins.scale == "log" else -math.inf
    lower = np.repeat([least, *edges], counts)
    upper = np.repeat([*edges, math.inf], counts)
    # What is told of devices beyond the bins is the end of the bins.
    low, high = (np.clip(values, edges[0] if least else 0.0, edges[-1]) for values in (lower, upper))

    def estimated(figure: Callable[[Values], float]) -> Estimate:
        with np.errstate(invalid="ignore"):
            bounded = math.isfinite(figure(lower)) and math.isfinite(figure(upper))
        first, last = figure(low), figure(high)
        return Estimate(value=(first + last) / 2, error=(last - first) / 2 if bounded else None)

    return _describe(estimated, bins, counts)


def _places(bins: Bins, values: Values) -> NDArray[np.integer]:
    # The last bin has both its edges.
    return np.where(values == bins.high, bins.count, np.searchsorted(bins.edges(), values, side="right"))


def _describe(
    tell: Callable[[Callable[[Values], float]], Estimate], bins: Bins, counts: NDArray[np.integer]
) -> Distribution:
    return Distribution(
        devices=int(counts.sum()),
        mean=tell(lambda values: float(values.mean())),
        deciles=[tell(lambda values, share=share: quantile(values, share)) for share in DECILES],  # type: ignore[misc]
        worst=tell(lambda values: worst_mean(values, bins.better)),
        edges=bins.edges().tolist(),
        counts=counts.tolist(),
    )


def quantile(values: Values, share: float) -> float:
    """The value below which `share` of the values lie, linearly interpolated between two of them."""
    return float(np.quantile(values, share))


def worst_mean(values: Values, better: Literal["higher", "lower"]) -> float:
    """The mean of the worst tenth of the values, rounded up to whole devices."""
    ascending = np.sort(values)
    tenth = math.ceil(len(values) * WORST_SHARE - 1e-9)
    return float((ascending[:tenth] if better == "higher" else ascending[-tenth:]).mean())
