"""Notes faults that are clearly one device's own, and sets devices aside.

A fault is noted in the transaction of the code that sees it. Only what a device sent over its own session or under its
own signature counts, and only if nobody else can have made it send that. The consequence follows when the round ends:
with `max_faults` faults within `fault_seconds` the device is set aside. Then no round takes it for a time that doubles
with each repetition, or until an operator releases it.
"""

from __future__ import annotations

import time

from sqlalchemy import Select, func, select
from sqlalchemy.orm import Session

from archipel.protocol.backoff import Backoff
from archipel.server.audit import log as audit
from archipel.server.database.fault_tables import Fault, Quarantine
from archipel.server.database.tables import Device, Round, Task
from archipel.server.settings import Settings

MAX_DOUBLINGS = 10


def note_fault(session: Session, *, device_id: str, round_id: str, reason: str, now: float | None = None) -> bool:
    """Note in the caller's transaction that the device did something wrong in the round. Returns whether that is new.

    `reason` is one of the server's own texts, of at most 128 characters, and never has the device's words. A fault is
    noted once for each device, round and reason. A round with faults that fails does not count against its task.
    """
    if session.get(Fault, (round_id, device_id, reason)) is not None:
        return False
    noted = time.time() if now is None else now
    session.add(Fault(round_id=round_id, device_id=device_id, reason=reason, noted=noted))
    session.flush()
    audit.append(session, noted, "server", "device.fault", device_id, round=round_id, reason=reason)
    return True


def has_faults(session: Session, round_id: str) -> bool:
    """Whether any device is known to have done something wrong in the round."""
    return bool(session.scalar(select(select(Fault.device_id).where(Fault.round_id == round_id).exists())))


def set_aside_faulty(session: Session, round_id: str, settings: Settings, now: float) -> list[str]:
    """Set aside the devices with a fault in this round that have too many by now. Returns their ids."""
    population = select(Task.population).join(Round).where(Round.round_id == round_id).scalar_subquery()
    faulty = select(Fault.device_id, population.label("population")).where(Fault.round_id == round_id).distinct()
    aside = []
    for device_id, name in session.execute(faulty.order_by(Fault.device_id)).all():
        before = session.get(Quarantine, device_id)
        ended = 0.0 if before is None else before.until
        if ended > now:
            continue
        # Faults up to the end of an earlier quarantine do not count again.
        since = max(now - settings.fault_seconds, ended)
        counted = select(Fault.reason, func.count()).join(Round).where(Fault.device_id == device_id)
        # By when its round began: a round from before the quarantine may end after it.
        by_reason = session.execute(counted.where(Round.started >= since).group_by(Fault.reason)).all()
        number = sum(count for _, count in by_reason)
        if number < settings.max_faults:
            continue
        # Lists of devices show one reason: the most frequent one.
        # The reason's text decides a tie, so that the answer does not depend on the order of the rows.
        most = max(by_reason, key=lambda row: (row[1], row[0]))[0]
        detail = f"{number} faults: " + ", ".join(
            f"{count} x {reason}" for reason, count in sorted(map(tuple, by_reason))
        )
        set_aside(session, device_id, name, most, detail, round_id, settings=settings, now=now)
        aside.append(device_id)
    return aside


def set_aside(
    session: Session,
    device_id: str,
    population: str,
    reason: str,
    detail: str,
    round_id: str,
    *,
    settings: Settings,
    now: float,
) -> Quarantine:
    """Let no round take the device for `quarantine_seconds`, and twice as long with each further time.

    `reason` is a word or two for lists, `detail` what was counted.
    """
    row = session.get(Quarantine, device_id)
    if row is None:
        row = Quarantine(device_id=device_id, population=population, times=0)
        session.add(row)
    row.reason, row.detail, row.round_id = reason, detail[:512], round_id
    row.since = now
    first = settings.quarantine_seconds
    row.times += 1
    row.until = now + Backoff(first, longest=first * 2**MAX_DOUBLINGS).after(row.times)
    row.released = None
    session.flush()
    audit.append(
        session, now, "coordinator", "device.quarantine", device_id,
        population=population, reason=reason, detail=row.detail, round=round_id, until=row.until,
    )  # fmt: skip
    return row


def release(session: Session, device: Device, actor: str, now: float) -> bool:
    """Let rounds take the device again. Returns whether it was set aside."""
    # The audit log's lock before the row's, in the order of the coordinator, or the two could wait for each other.
    audit.take_turn(session)
    row = session.get(Quarantine, device.device_id, with_for_update=True)
    if row is None or row.until <= now:
        return False
    row.until = row.released = now
    session.flush()
    audit.append(session, now, actor, "device.release", device.device_id, population=device.population)
    return True


def set_aside_now(population: str, now: float) -> Select[str]:
    """A query for the ids of the population's devices that are set aside now."""
    return select(Quarantine.device_id).where(Quarantine.population == population, Quarantine.until > now)
