"""Norm bounding (Sun et al. 2019, *Can you really backdoor federated learning?*)."""

from __future__ import annotations

import numpy as np

from archipel.strategies.robust.rule import Row, Rows, Rule, State, clipped_mean, majority, norms


def aggregate(updates: Rows, tolerated: int, state: State) -> tuple[Row, dict[str, Row]]:
    """The mean of the updates, each shortened to at most the median of their norms.

    It bounds what one update can do, and does not make it nothing: f of n move the mean by f / n of that norm.
    """
    return clipped_mean(updates, float(np.median(norms(updates)))), {}


RULE = Rule("norm-bounding", aggregate, majority)
