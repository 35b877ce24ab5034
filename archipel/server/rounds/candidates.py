"""Finds the devices that a task's next round may take: waiting, eligible, and below the task's limits per device.

Callers get only counts and ids. The attributes that a device reports are compared with the task's eligibility, and used
for nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import ColumnElement, Select, func, or_, select
from sqlalchemy.orm import InstrumentedAttribute, Session

from archipel.protocol.messages import over_neighbours
from archipel.protocol.operator.tasks import TaskRequest
from archipel.server.database.fault_tables import Rest
from archipel.server.database.privacy_tables import PrivacyEvent
from archipel.server.database.tables import UPDATE_PHASES, Answer, CheckInRow, Device, Participant, Round, Task
from archipel.server.database.task_requests import request_of
from archipel.server.devices.faults import set_aside_now
from archipel.server.devices.rests import resting
from archipel.server.devices.root_devices import roots_of_trainings
from archipel.server.devices.targeting import Target

LATELY = 600.0
"""Seconds: a device without a round that has not come for so long is probably gone."""


def candidates(session: Session, task: Task, *, now: float, window: float, lock: bool = True) -> list[str]:
    """Ids of the devices that the task may take now, in no particular order.

    `window` (seconds): see `is_waiting`. With `lock` the check-ins' rows stay locked until the transaction ends, so no
    other task takes the same devices.
    """
    where = _conditions(task, now, window, rest_ends(session, task, now))
    query = select(CheckInRow.device_id, CheckInRow.attributes).where(*where)
    rows = session.execute(query.with_for_update(of=CheckInRow) if lock else query)
    target = target_of(task)
    return [row.device_id for row in rows if target.takes(row.device_id, row.attributes)]


def count_candidates(session: Session, task: Task, *, now: float, window: float) -> int:
    """How many `candidates` there are."""
    where = _conditions(task, now, window, rest_ends(session, task, now))
    target = target_of(task)
    if target.everybody:  # the database can count, and no attributes are read
        return session.scalar(select(func.count()).select_from(CheckInRow).where(*where)) or 0
    rows = session.execute(select(CheckInRow.device_id, CheckInRow.attributes).where(*where))
    return sum(target.takes(row.device_id, row.attributes) for row in rows)


def could_take(session: Session, task: Task, device_id: str, attributes: Mapping[str, Any], *, now: float) -> bool:
    """Whether the task could take this device if it waits: it is one of the task's, and need not rest."""
    if not target_of(task).takes(device_id, attributes):
        return False
    able = [*_able(task, now, rest_ends(session, task, now)), *_rested(task, now)]
    return session.scalar(select(CheckInRow.device_id).where(CheckInRow.device_id == device_id, *able)) is not None


def root_waits(session: Session, task: Task, *, now: float, window: float) -> bool:
    """Whether the task's root device may be given its seat now; a task without one needs none.

    What limits how often the task takes other devices, and which, does not hold for the one that the operator named.
    """
    if task.root is None:
        return True
    query = select(CheckInRow.device_id).where(
        CheckInRow.device_id == task.root,
        *is_waiting(now, window),
        CheckInRow.device_id.not_in(set_aside_now(task.population, now)),
        CheckInRow.device_id.not_in(resting(task.bundle, task.kind, now, Rest.soonest)),
    )
    return session.scalar(query) is not None


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


def in_last_sums(task: Task) -> Select[str]:
    """Ids of the devices that rest because they were in one of the last sums of a task with correlated noise.

    The sums count in the order in which they were paid for, also those of rounds that failed afterwards.
    """
    separation = request_of(task).differential_privacy.separation or 1
    paid = select(PrivacyEvent.round_id).where(PrivacyEvent.task_id == task.task_id)
    last = paid.order_by(PrivacyEvent.number.desc()).limit(separation - 1)
    return select(Answer.device_id).where(Answer.round_id.in_(last), Answer.phase.in_(UPDATE_PHASES))


def in_sum(round_id: str) -> Select[str]:
    """Ids of the devices whose updates are in the sum of a round."""
    counted = select(Answer.device_id).where(Answer.round_id == round_id, Answer.phase.in_(UPDATE_PHASES))
    of_task = counted.join(Round, Round.round_id == Answer.round_id).join(Task, Task.task_id == Round.task_id)
    return of_task.where(or_(Task.root.is_(None), Task.root != Answer.device_id))


def target_of(task: Task) -> Target:
    """The part of the population that the task is for."""
    return Target(task.eligibility, task.salt, task.percent)


def fewest(task: Task) -> int:
    """With how few devices a round of the task begins."""
    request = request_of(task)
    if request.mode == "synchronous":
        return request.goal or request.cohort
    if request.mode == "asynchronous":
        # A secure asynchronous round is a group of exactly `cohort` devices (docs/design.md, "Asynchronous tasks").
        return 1 if task.buffered else request.cohort
    return least_devices(request) * max(request.secure_groups, 1)


def least_devices(request: TaskRequest) -> int:
    """How many updates a semi-synchronous round or group needs at least."""
    # Below the threshold the sum could not be unmasked; below `min_cohort` it would hide too few devices. Over
    # neighbours the threshold is one of the others.
    return max((request.threshold or 1) + over_neighbours(request.protocol), request.min_cohort)


def rest_ends(session: Session, task: Task, now: float) -> InstrumentedAttribute[float]:
    """The column of a rest that says when the task takes the device again.

    It is `soonest` where fewer other devices than a round needs have come lately, else `until`. Whether they wait just
    now does not matter: else a device that leaves each round would be taken as soon as one of the others is late.
    """
    if session.scalar(resting(task.bundle, task.kind, now).limit(1)) is None:
        return Rest.until
    here = (CheckInRow.last_seen > now - LATELY) | (CheckInRow.due > now) | CheckInRow.round_id.is_not(None)
    others = (
        select(CheckInRow.device_id, CheckInRow.attributes)
        .join(Device, Device.device_id == CheckInRow.device_id)
        .where(CheckInRow.population == task.population, here, Device.revoked.is_(None), *_able(task, now, Rest.until))
    )
    target, needed = target_of(task), fewest(task)
    if target.everybody:
        others = others.limit(needed)
    found = 0
    for row in session.execute(others):
        found += target.takes(row.device_id, row.attributes)
        if found >= needed:
            return Rest.until
    return Rest.soonest


def _conditions(task: Task, now: float, window: float, ends: InstrumentedAttribute[float]) -> list[ColumnElement[bool]]:
    """What the database can decide about a check-in; the eligibility is evaluated here, row by row."""
    waits = [CheckInRow.population == task.population, *is_waiting(now, window)]
    return [*waits, *_able(task, now, ends), *_rested(task, now)]


def _rested(task: Task, now: float) -> list[ColumnElement[bool]]:
    """Conditions on a check-in: its device has had the rest that the task gives after each of its rounds."""
    seconds = request_of(task).rest_seconds
    if seconds <= 0:
        return []
    # Counted from the start of a round that the device was assigned to, also if it failed or the device left.
    recent = (
        select(Participant.device_id).join(Round).where(Round.task_id == task.task_id, Round.started > now - seconds)
    )
    return [CheckInRow.device_id.not_in(recent)]


def _able(task: Task, now: float, ends: InstrumentedAttribute[float]) -> list[ColumnElement[bool]]:
    """Conditions on a check-in: the task may take its device once that waits."""
    request = request_of(task)
    where: list[ColumnElement[bool]] = [
        CheckInRow.aggregator.is_(request.levels > 0),
        CheckInRow.device_id.not_in(set_aside_now(task.population, now)),
        CheckInRow.device_id.not_in(resting(task.bundle, task.kind, now, ends)),
        CheckInRow.device_id.not_in(roots_of_trainings(task)),
    ]
    if request.protocol == "neighbours":
        # Others cannot read the plan, and would keep their seats until the deadline.
        where.append(CheckInRow.neighbours.is_(True))
    if request.protocol == "neighbours-mlkem":
        where.append(CheckInRow.mlkem.is_(True))
    if request.differential_privacy.on_devices:
        # Others leave each round, which then fails.
        where.append(CheckInRow.adds_noise.is_(True))
    if request.max_contributions is not None:
        where.append(CheckInRow.device_id.not_in(have_given(task)))
    if request.differential_privacy.is_correlated:
        where.append(CheckInRow.device_id.not_in(in_last_sums(task)))
    if request.devices_of is not None:
        where.append(CheckInRow.device_id.in_(in_sum(request.devices_of)))
    return where
