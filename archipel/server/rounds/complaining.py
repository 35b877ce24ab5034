"""Takes devices out of a round that complaints accuse, and notes the fault as theirs.

Over neighbours nobody can prove that an envelope holds no shares; there those leave whose shares too few hold.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from archipel.protocol.messages import Complaints
from archipel.protocol.sealed import decode
from archipel.protocol.secagg import merge_complaints
from archipel.server.database.tables import Answer, Participant, Round
from archipel.server.database.task_requests import read_plan
from archipel.server.devices.faults import note_fault

if TYPE_CHECKING:
    from archipel.server.rounds.frozen import FrozenRounds


def read_complaints(session: Session, round_id: str) -> Complaints:
    """The round's complaints, one for each accused device. Each one was verified before it was stored."""
    rows = session.scalars(
        select(Answer.body).where(Answer.round_id == round_id, Answer.phase == "complaining", Answer.body.is_not(None))
    )
    return merge_complaints(decode("complaints", body or b"", Complaints) for body in rows)


def exclude(session: Session, current: Round, frozen: FrozenRounds, *, now: float) -> int:
    """Take out of the round who is not in U2, in the caller's transaction. Returns how many of them had answered.

    The caller subtracts that number from the answers of phase complaining: who is taken out may have answered too.
    """
    if read_plan(current).protocol == "complete":
        return exclude_accused(session, current, now=now)
    roster = frozen.roster(session, current.round_id)
    inside = {roster.ids[place] for place in roster.sharers(session)}
    answers = select(Answer.device_id).where(Answer.round_id == current.round_id, Answer.phase == "complaining")
    outside = sorted(set(session.scalars(answers)) - inside)
    if outside:
        of_round = Participant.round_id == current.round_id
        session.execute(update(Participant).where(of_round, Participant.device_id.in_(outside)).values(excluded=now))
    return len(outside)


def exclude_accused(session: Session, current: Round, *, now: float) -> int:
    """The same over the complete graph: the accused leave."""
    accused = {
        complaint.accused: complaint.complainer for complaint in read_complaints(session, current.round_id).complaints
    }
    if not accused:
        return 0
    current.complaints = len(accused)
    of_round = Participant.round_id == current.round_id
    session.execute(update(Participant).where(of_round, Participant.device_id.in_(accused)).values(excluded=now))
    for device_id, complainer in accused.items():
        reason = f"its signed envelope for {complainer} holds no shares"
        note_fault(session, device_id=device_id, round_id=current.round_id, reason=reason, now=now)
    answers = select(Answer.device_id).where(Answer.round_id == current.round_id, Answer.phase == "complaining")
    return len(set(session.scalars(answers)) & set(accused))


def excluded(session: Session, round_id: str) -> frozenset[str]:
    """Ids of the devices that were taken out of the round."""
    of_round = Participant.round_id == round_id
    return frozenset(session.scalars(select(Participant.device_id).where(of_round, Participant.excluded.is_not(None))))
