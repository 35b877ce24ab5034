"""Krum and Multi-Krum (Blanchard et al. 2017, *Machine learning with adversaries*).

Blanchard et al. score an update by its n - f - 2 nearest others and need n > 2f + 2. This is the variant of Allouah et
al. 2023 (*Fixing by mixing*): the n - f nearest, the update itself among them, for which n > 2f is enough.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from archipel.strategies.robust.rule import Row, Rows, Rule, State, majority, squared_distances


def aggregate(updates: Rows, tolerated: int, state: State) -> tuple[Row, dict[str, Row]]:
    """The update with the lowest score."""
    return updates[int(np.argmin(scores(updates, tolerated)))].copy(), {}


def aggregate_many(updates: Rows, tolerated: int, state: State) -> tuple[Row, dict[str, Row]]:
    """The mean of the n - f updates with the lowest scores."""
    best = np.argsort(scores(updates, tolerated), kind="stable")[: len(updates) - tolerated]
    return updates[best].mean(axis=0), {}


def scores(updates: Rows, tolerated: int) -> NDArray[np.float64]:
    """For each update the sum of its squared distances to the n - f nearest, itself among them, `[n]`."""
    ascending = np.sort(squared_distances(updates), axis=1)
    return np.asarray(ascending[:, : len(updates) - tolerated].sum(axis=1))


KRUM = Rule("krum", aggregate, majority)
MULTI_KRUM = Rule("multi-krum", aggregate_many, majority)
