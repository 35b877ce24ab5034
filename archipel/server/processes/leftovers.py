"""Whose files the spool still needs; all others are removed."""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.orm import Session

from archipel.server.database.tables import LIVE, Task
from archipel.server.database.task_requests import request_of
from archipel.server.rounds.at_work import rounds_at_work


def owners_of_files(session: Session, *, now: float) -> list[str]:
    """Ids of the rounds whose updates and sums, and of the tasks whose noise, are still needed at `now` (Unix
    seconds)."""
    live = session.scalars(select(Task).where(Task.state.in_(LIVE)))
    # Files of noise that later rounds take back lie under their task's id.
    tasks = [task.task_id for task in live if request_of(task).differential_privacy.is_correlated]
    return [*session.scalars(rounds_at_work(now)), *tasks]
