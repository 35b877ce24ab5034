"""What guesses about who took part prove about epsilon: lower bounds that hold with a given confidence."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.stats import binom, norm

Numbers = NDArray[np.float64]
Flags = NDArray[np.bool_]


def area(scores: Numbers, members: Flags) -> float:
    """The area under the curve of true over false positives: how often a member scores above another device, and half
    of how often both score the same. `scores` and `members`: [devices]."""
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    # The middle of the ranks that equal scores share.
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    inside = int(members.sum())
    return float((ranks[members].sum() - inside * (inside + 1) / 2) / (inside * (len(members) - inside)))


def true_positives(scores: Numbers, members: Flags, false_positives: float) -> float:
    """The share of members found where at most this share of the others is taken for members."""
    others = np.sort(scores[~members])[::-1]
    return float((scores[members] > others[math.floor(false_positives * len(others))]).mean())


def epsilon_of_guesses(right: int, guesses: int, canaries: int, delta: float, confidence: float = 0.95) -> float:
    """The least epsilon that one run with many canaries leaves possible (Steinke, Nasr, Jagielski 2023, theorem 5.2).

    Each of the canaries was in the run or not, by a fair coin of its own; the attack guesses some of the coins and says
    nothing of the others. Under (epsilon, delta)-privacy the probability of as many right guesses is at most

        P[B >= right] + 2 canaries delta max_i (P[B >= right - i] - P[B >= right]) / i,
        B binomial of `guesses` and e^epsilon / (e^epsilon + 1), i from 1 to `canaries`

    Returns the largest epsilon for which that is at most 1 - confidence; 0 where there is none.
    """

    def chance(epsilon: float) -> float:
        right_each = 1 / (1 + math.exp(-epsilon))
        tails = binom.sf(np.arange(right, -1, -1) - 1, guesses, right_each)
        steps = np.arange(1, len(tails))
        slack = float(((tails[1:] - tails[0]) / steps).max()) if len(steps) else 0.0
        return float(tails[0] + 2 * canaries * delta * slack)

    low, high = 0.0, 50.0
    if chance(low) > 1 - confidence:
        return 0.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if chance(middle) <= 1 - confidence else (low, middle)
    return low


def epsilon_of_normal(found: Numbers, others: Numbers, delta: float) -> float:
    """An estimate, no bound: the epsilon of two normal distributions with these scores' means and common variance.

    As Andrew et al. 2024 ("One-shot empirical privacy estimation for federated learning") estimate it; of distributions
    mu deviations apart, delta is Phi(mu / 2 - epsilon / mu) - e^epsilon Phi(-mu / 2 - epsilon / mu) (Balle and Wang
    2018, theorem 8).
    """
    free = len(found) + len(others) - 2
    variance = (found.var() * len(found) + others.var() * len(others)) / free
    apart = float((found.mean() - others.mean()) / math.sqrt(variance))
    if apart <= 0:
        return 0.0

    def spent(epsilon: float) -> float:
        first = norm.cdf(apart / 2 - epsilon / apart)
        # Where e^epsilon is too large for floating point, the product is still small.
        return float(first - np.exp(epsilon + norm.logcdf(-apart / 2 - epsilon / apart)) - delta)

    return 0.0 if spent(0.0) <= 0 else float(brentq(spent, 0.0, apart * (apart / 2 + 40)))
