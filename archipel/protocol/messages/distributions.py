"""The bins in which devices count themselves, by the value that a metric has on each."""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from archipel.protocol.messages.base import Message, MetricName

MAX_BINS = 100

BinCount = Annotated[int, Meta(ge=1, le=MAX_BINS)]


class Bins(Message, frozen=True, kw_only=True):
    """Bins of a metric's value, on all devices the same.

    Arguments:
        low, high: the first and the last edge; values beyond them are counted apart.
        count: how many bins lie between them.
        scale: "linear": bins of one width; "log": each wider than the one before by one factor, for metrics that are
            never below 0, such as a loss.
        better: whether a higher value or a lower one is better, so which devices are the worst.

    Raises ValueError for edges that are not finite, or not in this order, or of a "log" scale not above 0.

    Example:
        print(Bins(low=0, high=1, count=4).edges())  # [0.   0.25 0.5  0.75 1.  ]
    """

    low: float
    high: float
    count: BinCount = 20
    scale: Literal["linear", "log"] = "linear"
    better: Literal["higher", "lower"] = "higher"

    def __post_init__(self) -> None:
        # At most so far apart, so that no difference or quotient of two edges overflows.
        if not (abs(self.low) <= 1e30 and abs(self.high) <= 1e30 and self.low < self.high):
            raise ValueError(f"low {self.low!r} and high {self.high!r} must be numbers with low below high")
        if self.scale == "log" and self.low < 1e-30:
            raise ValueError(f"low {self.low!r} of bins with scale 'log' must be above 0")
        edges = self.edges()
        if not (np.diff(edges) > 0).all():
            raise ValueError(f"{self.count} bins from {self.low!r} to {self.high!r} are too narrow; give fewer")

    def edges(self) -> NDArray[np.float64]:
        """The bins' edges, ascending: float64 `[count + 1]`."""
        share = np.arange(self.count + 1) / self.count
        if self.scale == "log":
            edges = self.low * (self.high / self.low) ** share
        else:
            edges = self.low + share * (self.high - self.low)
        # Rounding may not move the ends, which are told apart from what is beyond them.
        edges[0], edges[-1] = self.low, self.high
        return edges


Distributions = Annotated[dict[MetricName, Bins], Meta(max_length=16)]
"""Metrics by name, each with the bins that devices count themselves in."""
