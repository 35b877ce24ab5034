"""Whether something has happened in tasks, by a few small queries for all tasks together."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from sqlalchemy import BindParameter, bindparam, func, select

from archipel.server.database.engine import Database
from archipel.server.database.tables import Answer, Participant, Round, Task

_OF: BindParameter[Any] = bindparam("tasks", expanding=True)
_IN: BindParameter[Any] = bindparam("rounds", expanding=True)
_TASKS = select(
    Task.task_id, Task.state, Task.rounds_committed, Task.failed_rounds, Task.spoiled_rounds, Task.model
).where(Task.task_id.in_(_OF))  # fmt: skip
_ROUNDS = select(Round.task_id, Round.round_id, Round.phase, Round.phase_ends).where(
    Round.ended.is_(None), Round.task_id.in_(_OF)
)
_ANSWERS = select(Answer.round_id, func.count()).where(Answer.round_id.in_(_IN)).group_by(Answer.round_id)
_SEATS = (
    select(Participant.round_id, func.count(), func.count(Participant.left), func.count(Participant.excluded))
    .where(Participant.round_id.in_(_IN))
    .group_by(Participant.round_id)
)


def read_stamps(database: Database, tasks: Collection[str]) -> Mapping[str, object]:
    """Something for each task that is another one when a round or phase begins or ends, or a device answers or leaves.

    Raises SQLAlchemyError.
    """
    if not tasks:
        return {}
    stamps: dict[str, list[object]] = {
        row.task_id: [tuple(row)] for row in database.look_all(_TASKS, tasks=list(tasks))
    }
    rows = database.look_all(_ROUNDS, tasks=list(tasks))
    live = {row.round_id: row.task_id for row in rows}
    found = [tuple(row) for row in rows]
    if live:
        of_rounds = [*database.look_all(_ANSWERS, rounds=list(live)), *database.look_all(_SEATS, rounds=list(live))]
        found += [(live[row[0]], *row) for row in of_rounds]
    for each in sorted(found, key=str):
        stamps.setdefault(str(each[0]), []).append(each)
    return {task: tuple(of_task) for task, of_task in stamps.items()}
