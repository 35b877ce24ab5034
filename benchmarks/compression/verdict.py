"""Three answers to whether a limit is met, from a 95% interval: all of it on the right side, none of it, or neither."""

from __future__ import annotations

import math
from typing import Literal

Outcome = Literal["yes", "open", "no"]
_ORDER: tuple[Outcome, ...] = ("no", "open", "yes")
Z = 1.959963984540054  # of a 95% interval


def at_least(limit: float, low: float, high: float) -> Outcome:
    """Whether what lies from `low` to `high` is at least `limit`. Ends are compared to nine digits."""
    if round(low - limit, 9) >= 0:
        return "yes"
    return "no" if round(high - limit, 9) < 0 else "open"


def at_most(limit: float, low: float, high: float) -> Outcome:
    """Whether what lies from `low` to `high` is at most `limit`."""
    return at_least(-limit, -high, -low)


def stricter(first: Outcome, *others: Outcome) -> Outcome:
    """The worst of them: "no" before "open" before "yes"."""
    return min((first, *others), key=_ORDER.index)


def shown(outcome: Outcome) -> str:
    """As the page prints it: what is not "yes" stands out."""
    return outcome if outcome == "yes" else f"**{outcome}**"


def wilson(share: float, count: int) -> tuple[float, float]:
    """95% score interval of a share of `count` examples (Wilson 1927), both 0..1."""
    middle = (share + Z * Z / (2 * count)) / (1 + Z * Z / count)
    half = Z / (1 + Z * Z / count) * math.sqrt(share * (1 - share) / count + Z * Z / (4 * count * count))
    return middle - half, middle + half


def median_interval(values: list[float]) -> tuple[float, float]:
    """Values between which the median lies with at least 95% (order statistics); the extremes where they are too few.

    With n independent values the k-th smallest and the k-th largest enclose it unless fewer than k of n fall on one
    side, each as likely as a coin: the largest k for which that happens in at most 2.5% on either side.
    """
    ordered, count = sorted(values), len(values)
    k, outside = 0, 0.0
    while (outside := outside + math.comb(count, k) / 2**count) <= 0.025:
        k += 1
    return ordered[max(k - 1, 0)], ordered[-max(k, 1)]
