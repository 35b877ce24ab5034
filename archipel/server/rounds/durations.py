"""What devices of a population take in the phases of rounds, and the deadlines that follow from it.

When a phase that waits for devices ends, the round notes in how many seconds most of them had answered: a high quantile
over those that were waited for, in which a device without an answer took for ever. A new round's phase may take a
multiple of the median of what the last rounds noted, with the same bundle, kind and privacy. So a device that is gone
does not hold the others up for as long as a default allows, and slow devices are given more time than that.

No single device decides: the slowest one does not count, unless the phase needs all of them, and then it could as well
not answer. Whatever devices do, a deadline is between SHORTEST (or the default, if that is shorter) and STRETCH times
the default. Where too many did not answer last time, nobody knows what they would have taken, and the default holds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from sqlalchemy import select
from sqlalchemy.orm import Session

from archipel.server.database.tables import Answer, Round, Task

SHARE = 0.8
"""The quantile that a phase notes."""
MULTIPLE = 4.0
SHORTEST = 15.0
"""Seconds: a device that lost its connection for a moment must find its round again."""
STRETCH = 5.0
FEWEST = 3
"""So many rounds are measured before their durations count."""
LAST = 8
"""So many rounds count, the newest ones."""


def note_duration(
    session: Session, current: Round, *, expected: int, needed: int, began: float, root: str | None = None
) -> None:
    """Note in the round what its phase took, before the phase changes.

    Arguments:
        session: The transaction that ends the phase.
        current: The round.
        expected: How many devices the phase waited for.
        needed: With how many answers it ends well.
        began: When the phase began (Unix seconds).
        root: The device without which the round fails, beside those that are expected: its time counts as well.
    """
    query = select(Answer.device_id, Answer.received).where(
        Answer.round_id == current.round_id, Answer.phase == current.phase
    )
    took = {row.device_id: row.received - began for row in session.execute(query)}
    roots = took.pop(root, None) if root is not None else 0.0
    noted = quantile(list(took.values()), expected, needed)
    if noted is not None:
        noted = None if roots is None else max(noted, roots)
    # A new object: the database does not see what changes within the old one.
    current.timings = {**(current.timings or {}), current.phase: noted}


def quantile(took: Sequence[float], expected: int, needed: int) -> float | None:
    """Seconds in which most of `expected` devices had answered, from what those that did `took`; None: they had not."""
    place = max(needed, min(math.ceil(SHARE * expected), expected - 1), 1)
    return sorted(took)[place - 1] if place <= len(took) else None


def measured_deadlines(session: Session, task: Task, defaults: dict[str, float]) -> dict[str, float]:
    """Seconds that each phase of the task's next round may take, for the phases of `defaults` that were measured."""
    query = (
        select(Round.timings)
        .join(Task)
        .where(
            Task.population == task.population,
            Task.bundle == task.bundle,
            Task.kind == task.kind,
            Task.privacy == task.privacy,
            Round.ended.is_not(None),
            Round.timings.is_not(None),
        )
    )
    newest = [each or {} for each in session.scalars(query.order_by(Round.ended.desc()).limit(LAST))]
    found = {}
    for phase, default in defaults.items():
        seconds = allowed([each[phase] for each in newest if phase in each], default)
        if seconds != default:
            found[phase] = seconds
    return found


def allowed(noted: Sequence[float | None], default: float) -> float:
    """The deadline that follows from what rounds noted of a phase, newest first (None: too few devices answered)."""
    if len(noted) < FEWEST or noted[0] is None:
        return default
    ordered = sorted(math.inf if each is None else each for each in noted)
    median = ordered[len(ordered) // 2]
    if math.isinf(median):
        return default
    return min(max(MULTIPLE * median, min(SHORTEST, default)), STRETCH * default)
