"""Devices that left a round rest: for growing times no round of the same kind with the same bundle takes them.

Most of what makes a device leave before its first message lies in the device: its owner's limits, too little memory,
data that do not fit. The next round would meet the same. But where there are too few other devices, no round could
begin without this one, and what made it leave may be over: then it rests for the shortest time only
(rounds.candidates). All devices rest for the same times, whatever they said, so the table tells no more than that they
left; what they said is counted apart from them (rounds.refusals). A device whose update counted is as good as new.
"""

from __future__ import annotations

from sqlalchemy import Connection, Select, delete, insert, or_, select, update
from sqlalchemy.orm import InstrumentedAttribute, Session

from archipel.protocol.backoff import Backoff
from archipel.server.database.fault_tables import Rest
from archipel.server.database.tables import UPDATE_PHASES, Answer, Round, Task

LONGEST = 86400.0
FORGOTTEN = 7 * 86400.0
"""A rest that ended so many seconds ago does not make the next one longer."""


def let_rest(connection: Connection, round_id: str, device_id: str, *, first: float, now: float) -> None:
    """Have the device that leaves the round rest for `first` seconds, twice as long with each further time in a row.

    The caller counts each device once for a round, in the same transaction.
    """
    bundle, kind = connection.execute(
        select(Task.bundle, Task.kind).join(Round, Round.task_id == Task.task_id).where(Round.round_id == round_id)
    ).one()
    mine = (Rest.bundle == bundle) & (Rest.kind == kind) & (Rest.device_id == device_id)
    times = 1 + (connection.execute(select(Rest.times).where(mine)).scalar() or 0)
    backoff = Backoff(first, longest=LONGEST)
    values = {"times": times, "soonest": now + backoff.after(1), "until": now + backoff.after(times)}
    if times > 1:
        connection.execute(update(Rest).where(mine).values(values))
    else:
        connection.execute(insert(Rest), {"bundle": bundle, "kind": kind, "device_id": device_id, **values})


def resting(bundle: str, kind: str, now: float, ends: InstrumentedAttribute[float] = Rest.until) -> Select[str]:
    """A query for the ids of the devices that rounds of tasks of this `kind` with `bundle` do not take at `now`.

    `ends`: `Rest.soonest` where there are too few other devices.
    """
    return select(Rest.device_id).where(Rest.bundle == bundle, Rest.kind == kind, ends > now)


def end_rests(session: Session, round_id: str, task: Task) -> None:
    """Forget how often the devices left whose updates are in the sum of the round, which is being committed."""
    in_sum = Answer.folded_into == round_id  # of a buffered round it is all; of others what checkpoints have
    if not task.buffered:
        in_sum = or_(in_sum, (Answer.round_id == round_id) & Answer.phase.in_(UPDATE_PHASES))
    counted = select(Answer.device_id).where(in_sum)
    of_task = (Rest.bundle == task.bundle, Rest.kind == task.kind)
    session.execute(delete(Rest).where(*of_task, Rest.device_id.in_(counted)))


def forget_rests(session: Session, now: float) -> None:
    """Delete the rests that ended long ago."""
    session.execute(delete(Rest).where(Rest.until < now - FORGOTTEN))
