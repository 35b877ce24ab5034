"""Gives devices their seats in a round, and releases those of a task that is over."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import insert, select, update
from sqlalchemy.orm import Session

from archipel.server.database.tables import CheckInRow, Participant, Round, Task
from archipel.server.devices import queries
from archipel.server.devices.spoiler_search import draw_round
from archipel.server.rounds.candidates import candidates
from archipel.server.rounds.groups import grouping


def assign(session: Session, current: Round, task: Task, needed: int, *, now: float, window: float) -> None:
    """Choose the devices of a round that begins, at least `needed` of those that wait, and give them their seats.

    `current` is the first of a round's groups, where it has groups; the devices are dealt out to all of them. The root
    device of the task, where it has one, gets a seat besides.
    """
    waiting = candidates(session, task, now=now, window=window)
    if queries.is_query(task):
        waiting = queries.choose(session, task, waiting, needed, now=now)
    chosen = draw_round(session, current, task, waiting, needed)
    groups = [current, *grouping.other_groups(session, current)]
    for group, devices in zip(groups, [chosen] if len(groups) == 1 else grouping.deal(chosen, len(groups))):
        seat(session, group.round_id, devices)
    if task.root is not None:
        seat(session, current.round_id, [task.root])


def seat(session: Session, round_id: str, chosen: Sequence[str], *, ends: float | None = None) -> None:
    """Assign the `chosen` devices to the round. `ends`: when a seat in a buffered round is given up (Unix seconds)."""
    if not chosen:
        return
    session.execute(
        insert(Participant), [{"round_id": round_id, "device_id": device, "ends": ends} for device in sorted(chosen)]
    )
    # With due = 0 a device counts as waiting only once it has checked in again after the round. Else the next round
    # could take a device that is gone.
    session.execute(update(CheckInRow).where(CheckInRow.device_id.in_(chosen)).values(round_id=round_id, due=0.0))


def let_go(session: Session, task: Task) -> None:
    """Release the devices of a buffered task that has ended, whichever of its rounds they have their seats in."""
    if task.buffered and not task.live:
        rounds = select(Round.round_id).where(Round.task_id == task.task_id)
        session.execute(update(CheckInRow).where(CheckInRow.round_id.in_(rounds)).values(round_id=None))
