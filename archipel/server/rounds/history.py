"""The steps that a task has made so far, as the limit of its next step needs them."""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.orm import Session

from archipel.server.database.tables import Round
from archipel.strategies.step_limits import History


def read_history(session: Session, task_id: str) -> History:
    """The norms of the steps of all committed rounds of the task."""
    rows = session.execute(
        select(Round.step_norm, Round.state_norm)
        .where(Round.task_id == task_id, Round.phase == "committed", Round.step_norm.is_not(None))
        # `Usual` depends on the order. Rounds of an asynchronous task can end at the same moment; then the id decides.
        .order_by(Round.ended, Round.round_id)
    ).all()
    return History([row.step_norm for row in rows], [row.state_norm for row in rows if row.state_norm is not None])
