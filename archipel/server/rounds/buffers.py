"""Seats of buffered rounds (asynchronous and plain): a device keeps its seat while versions are made without it.

FedBuff (Nguyen et al. 2022, "Federated learning with buffered asynchronous aggregation"): up to `concurrency` devices
work at once, each from the version that was newest when it got its seat. An update goes into the buffer of the round
that is open when the coordinator folds it. A device gives at most one update for each version it begins with.
"""

from __future__ import annotations

import secrets

from sqlalchemy import ColumnElement, Select, exists, func, or_, select, update
from sqlalchemy.orm import Session

from archipel.server.database.tables import Answer, CheckInRow, Participant, Round, Task
from archipel.server.rounds.assigning import seat
from archipel.server.rounds.candidates import candidates
from archipel.server.rounds.machine import deadline


def seats_are_due(session: Session, current: Round, task: Task, *, now: float, window: float) -> bool:
    """Whether `move_seats` would do anything. It only reads, so an idle task takes no write lock."""
    if session.scalar(select(_finished_devices(task, now).exists())):
        return True
    return _free_seats(session, task, now) > 0 and bool(_new_devices(session, current, task, now, window, lock=False))


def move_seats(session: Session, current: Round, task: Task, *, now: float, window: float) -> None:
    """Release the devices that have answered or are late, and give free seats to waiting devices."""
    finished = _finished_devices(task, now).subquery()
    session.execute(
        update(CheckInRow).where(CheckInRow.device_id.in_(select(finished.c.device_id))).values(round_id=None)
    )
    free = _free_seats(session, task, now)
    if free > 0:
        waiting = _new_devices(session, current, task, now, window, lock=True)
        # Unpredictable, so that no device can arrange to be taken.
        chosen = secrets.SystemRandom().sample(waiting, min(free, len(waiting)))
        seat(session, current.round_id, chosen, ends=now + deadline(task, "updating"))


def at_work(session: Session, task: Task, now: float) -> bool:
    """Whether an update is waiting for a buffer, or may still come."""
    waiting = (
        select(Answer.device_id)
        .join(Round)
        .where(Round.task_id == task.task_id, Answer.phase == "updating", Answer.folded_into.is_(None))
    )
    return _free_seats(session, task, now) < concurrency(task) or bool(session.scalar(select(waiting.exists())))


def _finished_devices(task: Task, now: float) -> Select[str]:
    # Through the check-ins, which name the one round that a device is in now, whether that round is open or over.
    return (
        select(CheckInRow.device_id)
        .join(Round, Round.round_id == CheckInRow.round_id)
        .join(
            Participant,
            (Participant.round_id == CheckInRow.round_id) & (Participant.device_id == CheckInRow.device_id),
        )
        .where(Round.task_id == task.task_id, or_(Participant.ends <= now, _has_answered()))
    )


def _has_answered() -> ColumnElement[bool]:
    return exists().where(
        Answer.round_id == Participant.round_id,
        Answer.device_id == Participant.device_id,
        Answer.phase == "updating",
    )


def _free_seats(session: Session, task: Task, now: float) -> int:
    # Seats of all rounds of the task: a device that began with an older version still takes one.
    taken = session.scalar(
        select(func.count(Participant.device_id))
        .join(Round)
        .where(Round.task_id == task.task_id, Participant.ends > now, ~_has_answered())
    )
    return concurrency(task) - (taken or 0)


def concurrency(task: Task) -> int:
    """How many devices may work for the task at once."""
    return task.concurrency or 2 * task.cohort


def _new_devices(session: Session, current: Round, task: Task, now: float, window: float, *, lock: bool) -> list[str]:
    # All seats of a round begin with the same version, so a device that had one has given its update for that version.
    seated = set(session.scalars(select(Participant.device_id).where(Participant.round_id == current.round_id)))
    waiting = candidates(session, task, now=now, window=window, lock=lock)
    return [device for device in waiting if device not in seated]
