"""Limits how far one step of a training moves its model: to the strategy's bound, and to what is usual for the task.

One device alone can push a sum close to the strategy's bound: the bound follows from the clip, which honest devices
rarely reach together. So a step longer than RATIO times the running median of the task's committed steps is scaled down
to that length. The median counts a step as it was applied, and as COUNTED times the median before it at most. An
attacker of most rounds from some round on can push the median, but needs as many rounds as there were before to push it
by half.

With one or two steps the larger one replaces the median. Three are the fewest steps of which a single unusual one,
attacked or of devices that hardly moved, does not decide the median. A limit that is too low costs a training little,
because a scaled step still goes three times as far as the usual one. Only the strategy's bound limits the first step,
and if most rounds are attacked from the first on, the attacker decides the median. Steps of 0 (no device changed
anything) do not count, or nothing would ever move again.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from archipel.errors import BoundError
from archipel.protocol.bounds import SLACK, joint_norm
from archipel.strategies.strategy import StepBound, Tensors, storage_rounding

RATIO = 3.0
"""A step may be this many times as long as the median of the steps before it."""
ENOUGH = 3
"""The fewest steps of which the median is used."""
COUNTED = 1.5
"""The median counts a step as at most this many times the median before it."""


@dataclass(frozen=True)
class Step:
    """L2 norms of what a step changes, as applied. `scale` is what it was multiplied with: 1, or less if too long."""

    parameters: float
    state: float
    scale: float = 1.0

    @property
    def note(self) -> str:
        """One line for the operator if the step was scaled down, else empty."""
        if self.scale == 1.0:
            return ""
        return (
            f"the step was scaled down by {self.scale:.3g}: its norm was {self.parameters / self.scale:.4g}, more than "
            f"{RATIO:g} times what is usual in this task"
            + (f" (its state's {self.state / self.scale:.4g})" if self.state else "")
        )


class Usual:
    """What norm is usual, after steps of these norms, oldest first."""

    def __init__(self, norms: Iterable[float] = ()) -> None:
        self._counted: list[float] = []  # sorted
        for norm in norms:
            self.add(norm)

    def add(self, norm: float) -> None:
        """Count one more step."""
        counted = self._counted
        if norm > 0:
            # Capped by the median of the steps before it alone, so the result depends on the order of the steps.
            insort(counted, min(norm, COUNTED * _median(counted)) if len(counted) >= ENOUGH else norm)

    @property
    def limit(self) -> float:
        """The largest norm allowed for the next step; infinite after none."""
        if not self._counted:
            return math.inf
        return RATIO * (_median(self._counted) if len(self._counted) >= ENOUGH else self._counted[-1])


class History:
    """Norms of the task's committed steps as applied, oldest first, of the parameters and of the strategy's state."""

    def __init__(self, parameters: Iterable[float] = (), state: Iterable[float] = ()) -> None:
        self.parameters, self.state = Usual(parameters), Usual(state)

    def add(self, step: Step) -> None:
        """Count the step that was committed last."""
        self.parameters.add(step.parameters)
        self.state.add(step.state)


def keep_within(
    before: tuple[Mapping[str, np.ndarray], Tensors],
    after: tuple[Tensors, Tensors],
    bound: StepBound,
    history: History,
) -> tuple[Tensors, Tensors, Step]:
    """Scale a step down if it goes too far.

    Parameters and state are scaled by one factor: both come from one sum, and the sum is what may be attacked.

    Arguments:
        before: Parameters and strategy state before the step.
        after: The same after it, with the same names and shapes.
        bound: The strategy's bound of both norms for a sum of this cohort.
        history: The norms of the task's committed steps.

    Returns:
        The parameters and the state to keep, and the norms of what they change. Deterministic: a round that is
        aggregated again after a kill gives the same bytes.

    Raises:
        BoundError: A norm is beyond `bound`, which no sum reaches that passed the check of sums.
    """
    moved = [_norm(old, new) for old, new in zip(before, after, strict=True)]
    for what, norm, most, old in zip(("parameters", "state"), moved, (bound.parameters, bound.state), before):
        # `not <=` also refuses NaN. Storing values rounds them, once before the step and once after it.
        if not norm <= most * (1 + SLACK) + 2 * storage_rounding(old) + 1e-12:
            raise BoundError(f"rejected: the step of the {what} has a norm of {norm:.6g}, it can be {most:.6g} at most")
    limits = history.parameters.limit, history.state.limit
    scale = min([1.0, *(most / norm for most, norm in zip(limits, moved) if norm > most)])
    step = Step(moved[0] * scale, moved[1] * scale, scale)
    if scale == 1.0:
        return *after, step
    return _shorten(before[0], after[0], scale), _shorten(before[1], after[1], scale), step


def _median(ascending: Sequence[float]) -> float:
    middle = len(ascending) // 2
    return ascending[middle] if len(ascending) % 2 else (ascending[middle - 1] + ascending[middle]) / 2


def _norm(before: Mapping[str, np.ndarray], after: Mapping[str, np.ndarray]) -> float:
    # In float64: the difference of two close float32 values, and the sum of many squares, would lose digits.
    changes = (array.astype(np.float64) - before[name] for name, array in after.items())
    return joint_norm(changes)


def _shorten(before: Mapping[str, np.ndarray], after: Tensors, scale: float) -> Tensors:
    return {
        # In float64, and rounded once, when it is stored.
        name: (before[name] + scale * (array.astype(np.float64) - before[name])).astype(array.dtype)
        for name, array in after.items()
    }
