"""Centered clipping (Karimireddy et al. 2021, *Learning from history for Byzantine robust optimization*)."""

from __future__ import annotations

import numpy as np

from archipel.strategies.robust.rule import Row, Rows, Rule, State, clipped_mean, majority, norms

CENTER = "center"
_STEPS = 3


def aggregate(updates: Rows, tolerated: int, state: State) -> tuple[Row, dict[str, Row]]:
    """The center, moved three times by the mean of the differences to the updates, each clipped to a radius.

    The first center is the coordinate-wise median; then it is the last round's aggregate. The paper has a constant
    radius, which depends on the model; here it is the median of the distances to the center, so that half of the
    updates are not clipped whatever f of them are.
    """
    center = np.array(state[CENTER]) if CENTER in state else np.median(updates, axis=0)
    for _ in range(_STEPS):
        center = center + clipped_mean(updates - center, float(np.median(norms(updates - center))))
    return center, {CENTER: center}


RULE = Rule("centered-clipping", aggregate, majority)
