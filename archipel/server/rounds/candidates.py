"""Finds the devices that a task's next round may take: waiting, eligible, and below the task's limits per device.

Callers get only counts and ids. The attributes that a device reports are compared with the task's eligibility, and used
for nothing else.
"""

from __future__ import annotations

from sqlalchemy import ColumnElement, Select, func, select
from sqlalchemy.orm import Session

from archipel.server.database.tables import UPDATE_PHASES, Answer, CheckInRow, Participant, Round, Task
from archipel.server.database.task_requests import request_of
from archipel.server.devices.faults import set_aside_now
from archipel.server.devices.rests import resting
from archipel.server.devices.targeting import Target


def candidates(session: Session, task: Task, *, now: float, window: float, lock: bool = True) -> list[str]:
    """Ids of the devices that the task may take now, in no particular order.

    `window` (seconds): see `is_waiting`. With `lock` the check-ins' rows stay locked until the transaction ends, so no
    other task takes the same devices.
    """
    query = select(CheckInRow.device_id, CheckInRow.attributes).where(*_conditions(task, now, window))
    rows = session.execute(query.with_for_update(of=CheckInRow) if lock else query)
    target = target_of(task)
    return [row.device_id for row in rows if target.takes(row.device_id, row.attributes)]


def count_candidates(session: Session, task: Task, *, now: float, window: float) -> int:
    """How many `candidates` there are."""
    where = _conditions(task, now, window)
    target = target_of(task)
    if target.everybody:  # the database can count, and no attributes are read
        return session.scalar(select(func.count()).select_from(CheckInRow).where(*where)) or 0
    rows = session.execute(select(CheckInRow.device_id, CheckInRow.attributes).where(*where))
    return sum(target.takes(row.device_id, row.attributes) for row in rows)


def is_waiting(now: float, window: float) -> list[ColumnElement[bool]]:
    """Conditions on a check-in: its device is in no round, and is due at most `window` seconds before or after now."""
    return [
        # A device that is later than this is probably gone.
        CheckInRow.due > now - window,
        # A device that comes only in an hour would learn of its round when that is over.
        CheckInRow.due <= now + window,
        CheckInRow.round_id.is_(None),
    ]


def have_given(task: Task) -> Select[str]:
    """Ids of the devices that have given `max_contributions` updates to the task."""
    return (
        select(Answer.device_id)
        .join(Round)
        .where(Round.task_id == task.task_id, Round.phase != "failed", Answer.phase.in_(UPDATE_PHASES))
        .group_by(Answer.device_id)
        .having(func.count() >= request_of(task).max_contributions)
    )


def target_of(task: Task) -> Target:
    """The part of the population that the task is for."""
    return Target(task.eligibility, task.salt, task.percent)


def _conditions(task: Task, now: float, window: float) -> list[ColumnElement[bool]]:
    """What the database can decide about a check-in; the eligibility is evaluated here, row by row."""
    request = request_of(task)
    where = [CheckInRow.population == task.population, *is_waiting(now, window)]
    where.append(CheckInRow.device_id.not_in(set_aside_now(task.population, now)))
    where.append(CheckInRow.device_id.not_in(resting(task.bundle, task.kind, now)))
    if request.max_contributions is not None:
        where.append(CheckInRow.device_id.not_in(have_given(task)))
    if request.devices_of is not None:
        # The devices whose updates are in the sum of that round, and no others.
        counted = select(Answer.device_id).where(Answer.round_id == request.devices_of, Answer.phase.in_(UPDATE_PHASES))
        where.append(CheckInRow.device_id.in_(counted))
    if request.rest_seconds > 0:
        # Counted from the start of a round that the device was assigned to, also if it failed or the device left.
        recent = (
            select(Participant.device_id)
            .join(Round)
            .where(Round.task_id == task.task_id, Round.started > now - request.rest_seconds)
        )
        where.append(CheckInRow.device_id.not_in(recent))
    return where
