"""Counts the devices that take no part in a round by reason. It is not stored which device gave which reason."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection, bindparam, func, insert, select, update
from sqlalchemy.orm import Session

from archipel.protocol.messages import LeaveReason
from archipel.server.database.tables import Participant, Refusal, Round

UNTOLD = "untold"
"""The reason of devices whose owners do not want it told."""


def count_refusal(
    connection: Connection, round_id: str, device_id: str, reason: LeaveReason | None, now: float
) -> bool:
    """Count the refusal, once for each device, however often it repeats it. The caller has locked the round.

    Returns whether it was the device's first one.
    """
    # Whether the device was counted is kept with the participant, and the reason apart from it.
    if not connection.execute(_FIRST, {"of_round": round_id, "leaving": device_id, "at": now}).rowcount:
        return False
    row = {"of_round": round_id, "why": reason or UNTOLD}
    if not connection.execute(_ONE_MORE, row).rowcount:
        connection.execute(insert(Refusal), {"round_id": round_id, "reason": reason or UNTOLD, "devices": 1})
    return True


def refusals_of_rounds(session: Session, round_ids: Sequence[str]) -> dict[str, dict[str, int]]:
    """How many devices gave each reason, by round. Rounds without refusals are not in it."""
    rows = session.execute(
        select(Refusal.round_id, Refusal.reason, Refusal.devices).where(Refusal.round_id.in_(round_ids))
    )
    by_round: dict[str, dict[str, int]] = {}
    for row in rows.all():
        by_round.setdefault(row.round_id, {})[row.reason] = row.devices
    return by_round


def refusals_of_task(session: Session, task_id: str) -> dict[str, int]:
    """How often each reason was given in all rounds of the task."""
    query = (
        select(Refusal.reason, func.sum(Refusal.devices).label("devices"))
        .join(Round, Round.round_id == Refusal.round_id)
        .where(Round.task_id == task_id)
        .group_by(Refusal.reason)
        .order_by(Refusal.reason)
    )
    return {row.reason: int(row.devices) for row in session.execute(query)}


def told_reasons(session: Session, round_id: str) -> str:
    """What the devices that left the round said, as an addition to a sentence; empty if none left."""
    told = refusals_of_rounds(session, [round_id]).get(round_id, {})
    return f" (they said: {', '.join(f'{reason} {count}' for reason, count in sorted(told.items()))})" if told else ""


_FIRST = (
    update(Participant)
    .where(
        Participant.round_id == bindparam("of_round"),
        Participant.device_id == bindparam("leaving"),
        Participant.counted.is_(None),
    )
    .values(counted=bindparam("at"))
)
_ONE_MORE = (
    update(Refusal)
    .where(Refusal.round_id == bindparam("of_round"), Refusal.reason == bindparam("why"))
    .values(devices=Refusal.devices + 1)
)
