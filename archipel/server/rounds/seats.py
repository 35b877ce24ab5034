"""A device's seat in a round: what it may send and read now, and how its answers are stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, and_, bindparam, insert, select

from archipel.errors import ConflictError, ForbiddenError, GoneError, NotFoundError
from archipel.protocol.messages import Receipt
from archipel.server.database.tables import LIVE, Answer, Device, Participant, Round, Task
from archipel.server.database.task_requests import decode_request
from archipel.server.devices.revocation import require_active
from archipel.server.rounds.machine import ORDER, RULES

if TYPE_CHECKING:
    from archipel.server.services import Services


@dataclass(frozen=True)
class Seat:
    """One participant in one round. `answers` maps the phases that it answered in to the digests of what it sent.

    `buffer_ends`: of a buffered round, when the device's time is over. `task_over`: how the task ended, if it did.
    `left`: the device said that it will send nothing. `excluded`: a complaint about it holds. `max_cohort` is
    the plan's.
    """

    round_id: str
    device_id: str
    device_key: bytes
    phase: str
    phase_ends: float
    reason: str
    plan_digest: str
    update_bytes: int
    answers: Mapping[str, str] = field(default_factory=dict)
    privacy: str = "secure"
    buffer_ends: float | None = None
    left: bool = False
    excluded: bool = False
    max_cohort: int = 0
    task_over: str = ""
    now: float = 0.0
    staleness: int = 0
    max_staleness: int = 0

    @property
    def uploads_in(self) -> str:
        """The phase that its update belongs to."""
        return "masking" if self.privacy == "secure" else "updating"

    def may_send(self, phase: str, digest: str) -> bool:
        """True to store it, False when these very bytes are stored already. Raises ConflictError or GoneError."""
        stored = self.answers.get(phase)
        if self.buffer_ends is None:
            self._require_live()
        if stored == digest:
            return False
        if stored is not None:
            raise ConflictError(f"another message is stored for phase {phase}; a message cannot be replaced")
        if self.left:
            raise GoneError("this device has left the round")
        self._require_included()
        if self.buffer_ends is not None:
            self._require_time()
            return True
        if ORDER[self.phase] < ORDER[phase]:
            raise ConflictError(f"too early: the round is in phase {self.phase}, this belongs to {phase}")
        if ORDER[self.phase] > ORDER[phase]:
            raise GoneError(f"phase {phase} is over: the round is in phase {self.phase}")
        self._require_answer(RULES[phase].previous)
        return True

    def _require_time(self) -> None:
        """A buffered round's seat outlives the round."""
        if self.task_over:
            raise GoneError(f"the task is {self.task_over}")
        if self.now >= (self.buffer_ends or 0.0):
            raise GoneError("this device's time for the round is over")
        if self.staleness > self.max_staleness:
            raise GoneError(f"{self.staleness} versions were made meanwhile, the task allows {self.max_staleness}")

    def may_read(self, phase: str) -> None:
        """Raises ConflictError before `phase`, and GoneError for a device that dropped out before it."""
        self._require_live()
        self._require_included()
        if ORDER[self.phase] < ORDER[phase]:
            raise ConflictError(f"too early: the round is in phase {self.phase}, this is there from {phase} on")
        self._require_answer(RULES[phase].previous)

    def _require_live(self) -> None:
        if self.phase == "committed":
            raise GoneError("the round is over: it was committed")
        if self.phase == "failed":
            raise GoneError(f"the round failed: {self.reason}")

    def _require_included(self) -> None:
        if self.excluded:
            raise GoneError("this device is out of the round: a peer showed that it was sent no shares")

    def _require_answer(self, phase: str | None) -> None:
        if phase is not None and phase != "assigning" and phase not in self.answers:
            raise GoneError(f"this device dropped out: it did not complete phase {phase} in time")


_SEAT = (
    select(
        Round.phase,
        Round.phase_ends,
        Round.reason,
        Round.plan_digest,
        Round.update_bytes,
        Task.privacy,
        Task.cohort,
        Task.state,
        Task.request,
        Task.rounds_committed,
        Round.number,
        Participant.device_id,
        Participant.ends,
        Participant.left,
        Participant.excluded,
        Device.device_key,
        Device.revoked,
        Answer.phase.label("answered"),
        Answer.digest.label("answer"),
    )
    .join(Task, Task.task_id == Round.task_id)
    .outerjoin(
        Participant, and_(Participant.round_id == Round.round_id, Participant.device_id == bindparam("seat_device"))
    )
    .outerjoin(Device, Device.device_id == Participant.device_id)
    .outerjoin(Answer, Answer.of(Round.round_id, Participant.device_id))
    .where(Round.round_id == bindparam("seat_round"))
)
_LOCKED_SEAT = _SEAT.with_for_update(read=True, of=Round)


def find_seat(services: Services, round_id: str, device_id: str) -> Seat:
    """A look at the seat. Raises NotFoundError (no such round) or ForbiddenError (not in it, or revoked)."""
    rows = services.database.look_all(_SEAT, seat_round=round_id, seat_device=device_id)
    return _seat(rows, round_id, device_id, services.clock())


def take_seat(connection: Connection, round_id: str, device_id: str, *, now: float) -> Seat:
    """The seat, in a round that stays in its phase until the transaction ends. Raises as `find_seat`."""
    rows = connection.execute(_LOCKED_SEAT, {"seat_round": round_id, "seat_device": device_id}).all()
    return _seat(rows, round_id, device_id, now)


def _seat(rows: Sequence[Any], round_id: str, device_id: str, now: float) -> Seat:
    if not rows:
        raise NotFoundError(f"no round {round_id}")
    row = rows[0]
    if row.device_id is None:
        raise ForbiddenError("this device is not in the round")
    require_active(device_id, row.revoked)
    return Seat(
        round_id=round_id,
        device_id=device_id,
        device_key=row.device_key,
        phase=row.phase,
        phase_ends=row.phase_ends,
        reason=row.reason,
        plan_digest=row.plan_digest,
        update_bytes=row.update_bytes,
        answers={each.answered: each.answer for each in rows if each.answered is not None},
        privacy=row.privacy,
        buffer_ends=row.ends,
        left=row.left is not None,
        excluded=row.excluded is not None,
        max_cohort=row.cohort,
        task_over="" if row.state in LIVE else row.state,
        now=now,
        staleness=max(row.rounds_committed + 1 - row.number, 0),
        max_staleness=0 if row.ends is None else decode_request(row.request).max_staleness,
    )


def store_answer(
    services: Services,
    seat: Seat,
    phase: str,
    *,
    digest: str,
    size: int,
    body: bytes | None = None,
    also: Callable[[Connection], None] | None = None,
) -> Receipt:
    """Record that the device answered, in one transaction with `also`. Durable when it returns.

    Raises RefusalError when the phase ended meanwhile or another message was stored.
    """
    row = {
        "round_id": seat.round_id,
        "phase": phase,
        "device_id": seat.device_id,
        "digest": digest,
        "size": size,
        "body": body,
        "received": services.clock(),
    }

    def store(connection: Connection) -> Receipt:
        now = take_seat(connection, seat.round_id, seat.device_id, now=services.clock())
        if now.may_send(phase, digest):
            connection.execute(_STORE, row)
            if also is not None:
                also(connection)
        return Receipt()

    return services.database.together(store)


_STORE = insert(Answer)
