"""A device's seat in a round: what it may send and read now, and how its answers are stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from sqlalchemy import and_, bindparam, select
from sqlalchemy.orm import Session

from archipel.protocol.messages import Receipt
from archipel.server.models import Answer, Device, Participant, Round
from archipel.server.problems import refuse
from archipel.server.revocation import require_active
from archipel.server.rounds import ORDER, RULES
from archipel.server.services import Services


@dataclass(frozen=True)
class Seat:
    """One participant in one round. `answers` maps the phases that it answered in to the digests of what it sent."""

    round_id: str
    device_id: str
    device_key: bytes
    phase: str
    phase_ends: float
    reason: str
    plan_digest: str
    update_bytes: int
    answers: Mapping[str, str] = field(default_factory=dict)

    def may_send(self, phase: str, digest: str) -> bool:
        """True to store it, False when these very bytes are stored already. Raises ApiError 409 or 410."""
        self._require_live()
        stored = self.answers.get(phase)
        if stored == digest:
            return False
        if stored is not None:
            raise refuse(409, f"another message is stored for phase {phase}; a message cannot be replaced")
        if ORDER[self.phase] < ORDER[phase]:
            raise refuse(409, f"too early: the round is in phase {self.phase}, this belongs to {phase}")
        if ORDER[self.phase] > ORDER[phase]:
            raise refuse(410, f"phase {phase} is over: the round is in phase {self.phase}")
        self._require_answer(RULES[phase].previous)
        return True

    def may_read(self, phase: str) -> None:
        """Raises ApiError 409 before `phase`, and 410 for a device that dropped out before it."""
        self._require_live()
        if ORDER[self.phase] < ORDER[phase]:
            raise refuse(409, f"too early: the round is in phase {self.phase}, this is there from {phase} on")
        self._require_answer(RULES[phase].previous)

    def _require_live(self) -> None:
        if self.phase == "committed":
            raise refuse(410, "the round is over: it was committed")
        if self.phase == "failed":
            raise refuse(410, f"the round failed: {self.reason}")

    def _require_answer(self, phase: str | None) -> None:
        if phase is not None and phase != "assigning" and phase not in self.answers:
            raise refuse(410, f"this device dropped out: it did not complete phase {phase} in time")


_SEAT = (
    select(
        Round.phase,
        Round.phase_ends,
        Round.reason,
        Round.plan_digest,
        Round.update_bytes,
        Participant.device_id,
        Device.device_key,
        Device.revoked,
    )
    .outerjoin(
        Participant, and_(Participant.round_id == Round.round_id, Participant.device_id == bindparam("seat_device"))
    )
    .outerjoin(Device, Device.device_id == Participant.device_id)
    .where(Round.round_id == bindparam("seat_round"))
)
_LOCKED_SEAT = _SEAT.with_for_update(read=True, of=Round)
_ANSWERS = select(Answer.phase, Answer.digest).where(
    Answer.round_id == bindparam("seat_round"), Answer.device_id == bindparam("seat_device")
)


def take_seat(session: Session, round_id: str, device_id: str, *, lock: bool = False) -> Seat:
    """Raises ApiError 404 (no such round) or 403 (not in it, or revoked). `lock` keeps the round in its phase."""
    who = {"seat_round": round_id, "seat_device": device_id}
    row = session.execute(_LOCKED_SEAT if lock else _SEAT, who).one_or_none()
    if row is None:
        raise refuse(404, f"no round {round_id}")
    if row.device_id is None:
        raise refuse(403, "this device is not in the round")
    require_active(device_id, row.revoked)
    answers = session.execute(_ANSWERS, who)
    return Seat(
        round_id=round_id,
        device_id=device_id,
        device_key=row.device_key,
        phase=row.phase,
        phase_ends=row.phase_ends,
        reason=row.reason,
        plan_digest=row.plan_digest,
        update_bytes=row.update_bytes,
        answers={answer.phase: answer.digest for answer in answers},
    )


def store_answer(
    services: Services,
    seat: Seat,
    phase: str,
    *,
    digest: str,
    size: int,
    body: bytes | None = None,
    also: Callable[[Session], None] | None = None,
) -> Receipt:
    """Record that the device answered, in one transaction with `also`. Durable when it returns.

    Raises ApiError when the phase ended meanwhile or another message was stored.
    """
    with services.database.write() as session:
        now = take_seat(session, seat.round_id, seat.device_id, lock=True)
        if now.may_send(phase, digest):
            session.add(
                Answer(
                    round_id=seat.round_id,
                    phase=phase,
                    device_id=seat.device_id,
                    digest=digest,
                    size=size,
                    body=body,
                    received=services.clock(),
                )
            )
            if also is not None:
                also(session)
    return Receipt()
