"""The coordinate-wise trimmed mean (Yin et al. 2018, *Byzantine-robust distributed learning*)."""

from __future__ import annotations

import numpy as np

from archipel.strategies.robust.rule import Row, Rows, Rule, State, majority


def aggregate(updates: Rows, tolerated: int, state: State) -> tuple[Row, dict[str, Row]]:
    """For each coordinate the mean without the f largest and the f smallest values."""
    # Sorted, not only partitioned: the sum of the kept values then does not depend on the order of the rows.
    ascending = np.sort(updates, axis=0)
    return ascending[tolerated : len(updates) - tolerated].mean(axis=0), {}


RULE = Rule("trimmed-mean", aggregate, majority)
