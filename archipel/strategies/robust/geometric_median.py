"""The geometric median: the point with the smallest sum of distances to all updates.

Weiszfeld's algorithm as Vardi and Zhang (2000) made it safe at a point that is an update itself; in federated learning
Pillutla et al. 2022 (*Robust aggregation for federated learning*), which smooths instead.
"""

from __future__ import annotations

import numpy as np

from archipel.strategies.robust.rule import Row, Rows, Rule, State, majority, norms

_STEPS = 200
_EXACT = 1e-10
"""A step shorter than this, relative to the spread of the updates, ends the search."""


def aggregate(updates: Rows, tolerated: int, state: State) -> tuple[Row, dict[str, Row]]:
    """The geometric median."""
    # The median is near it whatever f updates are; the mean may be as far away as they want.
    point = np.median(updates, axis=0)
    spread = float(np.median(norms(updates - point)))
    for _ in range(_STEPS):
        moved = _step(updates, point, _EXACT * spread)
        length = float(np.linalg.norm(moved - point))
        point = moved
        if length <= _EXACT * spread:
            break
    return point, {}


def _step(updates: Rows, point: Row, near: float) -> Row:
    distances = norms(updates - point)
    away = distances > near
    if not away.any():
        return point
    weights = np.zeros(len(updates))
    weights[away] = 1.0 / distances[away]
    target = weights @ updates / weights.sum()
    here = int((~away).sum())
    if not here:
        return np.asarray(target)
    # At an update: it is the median itself if the pull of the others is at most the number of updates there.
    pull = float(np.linalg.norm(weights.sum() * (target - point)))
    keep = min(1.0, here / pull) if pull > 0 else 1.0
    return np.asarray((1.0 - keep) * target + keep * point)


RULE = Rule("geometric-median", aggregate, majority)
