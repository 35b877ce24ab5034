"""The coordinate-wise median (Yin et al. 2018, *Byzantine-robust distributed learning*)."""

from __future__ import annotations

import numpy as np

from archipel.strategies.robust.rule import Row, Rows, Rule, State, majority


def aggregate(updates: Rows, tolerated: int, state: State) -> tuple[Row, dict[str, Row]]:
    """The median of each coordinate; of an even number of updates the mean of the two in the middle."""
    return np.median(updates, axis=0), {}


RULE = Rule("median", aggregate, majority)
