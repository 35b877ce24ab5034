"""Whose files the spool still needs; all others are removed."""

from __future__ import annotations

from sqlalchemy import exists, or_, select
from sqlalchemy.orm import Session

from archipel.server.database.tables import LIVE, Answer, Participant, Round, Task
from archipel.server.database.task_requests import request_of


def owners_of_files(session: Session, *, now: float) -> list[str]:
    """Ids of the rounds whose updates and sums, and of the tasks whose noise, are still needed at `now` (Unix
    seconds)."""
    # A round of a live buffered task may have ended while devices still work for it, or before their updates were
    # folded into a later buffer.
    at_work = exists().where(Participant.round_id == Round.round_id, Participant.ends > now)
    waiting = exists().where(
        Answer.round_id == Round.round_id, Answer.phase == "updating", Answer.folded_into.is_(None)
    )
    buffered = (Task.mode == "asynchronous") & (Task.privacy == "plain") & Task.state.in_(LIVE)
    needed = select(Round.round_id).join(Task).where(or_(Round.ended.is_(None), buffered & or_(at_work, waiting)))
    live = session.scalars(select(Task).where(Task.state.in_(LIVE)))
    # Files of noise that later rounds take back lie under their task's id.
    tasks = [task.task_id for task in live if request_of(task).differential_privacy.is_correlated]
    return [*session.scalars(needed), *tasks]
