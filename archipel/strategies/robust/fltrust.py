"""FLTrust (Cao et al. 2021, *FLTrust: Byzantine-robust federated learning via trust bootstrapping*)."""

from __future__ import annotations

import numpy as np

from archipel.errors import PolicyError
from archipel.strategies.robust.rule import ROOT, Row, Rows, Rule, State, norms


def aggregate(updates: Rows, tolerated: int, state: State) -> tuple[Row, dict[str, Row]]:
    """The mean of the updates, each as long as the root update and weighted by its cosine with it (0 where below).

    `state[ROOT]`, `[d]`, is the update that the server made of examples of its own in this round. Any number of updates
    may be arbitrary. It is 0 where no update points as the root update does.
    """
    if ROOT not in state:
        raise PolicyError("fltrust: needs an update of the server's own examples; name the client that has them")
    root = state[ROOT]
    lengths = norms(updates)
    length = float(np.linalg.norm(root))
    tiny = np.finfo(np.float64).tiny
    directions = updates / np.maximum(lengths, tiny)[:, None]
    trust = np.maximum(directions @ (root / max(length, tiny)), 0.0)
    total = float(trust.sum())
    if total <= 0:
        return np.zeros(updates.shape[1]), {}
    return length * (trust @ directions) / total, {}


RULE = Rule("fltrust", aggregate, lambda tolerated: 1)
