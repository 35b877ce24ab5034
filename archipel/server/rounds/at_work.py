"""Which rounds devices or the coordinator still work for, some of them after they have ended."""

from __future__ import annotations

from sqlalchemy import Select, exists, or_, select

from archipel.server.database.tables import LIVE, Answer, Participant, Round, Task


def rounds_at_work(now: float) -> Select[str]:
    """Ids of the rounds whose updates, weights and broadcasts are still needed."""
    # A round of a live buffered task may have ended while devices still work for it, or before their updates were
    # folded into a later buffer.
    at_work = exists().where(Participant.round_id == Round.round_id, Participant.ends > now)
    waiting = exists().where(
        Answer.round_id == Round.round_id, Answer.phase == "updating", Answer.folded_into.is_(None)
    )
    buffered = (Task.mode == "asynchronous") & (Task.privacy == "plain") & Task.state.in_(LIVE)
    return select(Round.round_id).join(Task).where(or_(Round.ended.is_(None), buffered & or_(at_work, waiting)))
