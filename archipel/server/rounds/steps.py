"""How far one step of a training may move its model: the strategy's bound, and not far beyond what is usual for it.

A sum within the strategy's bound may still be one device's doing: the bound is made of the clip, and honest devices
rarely reach it together. So a step beyond RATIO times the running median of the task's committed steps is scaled down
to that. A step counts in the median as it was applied, and as COUNTED times the median before it at most: whoever
attacks most rounds from some round on pushes the median, but it takes as many rounds again as there were before to
push it by half.

Of one or two steps the larger stands in for the median: three are the fewest of which a single unusual one, attacked or
of devices that hardly moved, does not decide it. A limit that was too low costs a training little, because a scaled
step still goes three times as far as the usual one. Only the first step has no limit but the strategy's bound, and
where most rounds are attacked from the first on, the median is the attacker's. Steps of 0 (nobody had anything to say)
do not count, or nothing would ever move again.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from sqlalchemy import select
from sqlalchemy.orm import Session

from archipel.errors import BoundError
from archipel.protocol.bounds import SLACK
from archipel.server.database.tables import Round
from archipel.strategies.strategy import StepBound, Tensors, storage_rounding

RATIO = 3.0
ENOUGH = 3
"""So many steps make a median."""
COUNTED = 1.5


@dataclass(frozen=True)
class History:
    """Norms of the task's committed steps as applied, oldest first, of the parameters and of the strategy's state."""

    parameters: Sequence[float] = ()
    state: Sequence[float] = ()


@dataclass(frozen=True)
class Step:
    """L2 norms of what a step changes, as applied; `scale` below 1: it was scaled down by that."""

    parameters: float
    state: float
    scale: float = 1.0

    @property
    def note(self) -> str:
        """What an operator is told of a step that was scaled down, else nothing."""
        if self.scale == 1.0:
            return ""
        return (
            f"the step was scaled down by {self.scale:.3g}: its norm was {self.parameters / self.scale:.4g}, more than "
            f"{RATIO:g} times what is usual in this task"
            + (f" (its state's {self.state / self.scale:.4g})" if self.state else "")
        )


def read_history(session: Session, task_id: str) -> History:
    """Of all its committed rounds."""
    rows = session.execute(
        select(Round.step_norm, Round.state_norm)
        .where(Round.task_id == task_id, Round.phase == "committed", Round.step_norm.is_not(None))
        .order_by(Round.ended, Round.round_id)
    ).all()
    return History([row.step_norm for row in rows], [row.state_norm for row in rows if row.state_norm is not None])


def limit(norms: Sequence[float]) -> float:
    """The longest step after steps of these norms, oldest first; infinite after none."""
    counted: list[float] = []  # sorted
    for norm in norms:
        if norm > 0:
            insort(counted, min(norm, COUNTED * _median(counted)) if len(counted) >= ENOUGH else norm)
    if not counted:
        return math.inf
    return RATIO * (_median(counted) if len(counted) >= ENOUGH else counted[-1])


def keep_within(
    before: tuple[Mapping[str, np.ndarray], Tensors],
    after: tuple[Tensors, Tensors],
    bound: StepBound,
    history: History,
) -> tuple[Tensors, Tensors, Step]:
    """Parameters and state `after` a step, scaled down where it goes too far, and what it came to.

    Both are scaled by one factor: they come from one sum, and it is the sum that is doubted. Deterministic. Raises
    BoundError beyond the strategy's `bound`, which no sum reaches that passed the check of sums.
    """
    moved = [_norm(old, new) for old, new in zip(before, after, strict=True)]
    for what, norm, most, old in zip(("parameters", "state"), moved, (bound.parameters, bound.state), before):
        if not norm <= most * (1 + SLACK) + 2 * storage_rounding(old) + 1e-12:
            raise BoundError(f"rejected: the step of the {what} has a norm of {norm:.6g}, it can be {most:.6g} at most")
    limits = limit(history.parameters), limit(history.state)
    scale = min([1.0, *(most / norm for most, norm in zip(limits, moved) if norm > most)])
    step = Step(moved[0] * scale, moved[1] * scale, scale)
    if scale == 1.0:
        return *after, step
    return _shorten(before[0], after[0], scale), _shorten(before[1], after[1], scale), step


def _median(ascending: Sequence[float]) -> float:
    middle = len(ascending) // 2
    return ascending[middle] if len(ascending) % 2 else (ascending[middle - 1] + ascending[middle]) / 2


def _norm(before: Mapping[str, np.ndarray], after: Mapping[str, np.ndarray]) -> float:
    squares = 0.0
    for name, array in after.items():
        change = array.astype(np.float64) - before[name]
        squares += float(np.vdot(change, change))
    return math.sqrt(squares)


def _shorten(before: Mapping[str, np.ndarray], after: Tensors, scale: float) -> Tensors:
    return {
        name: (before[name] + scale * (array.astype(np.float64) - before[name])).astype(array.dtype)
        for name, array in after.items()
    }
