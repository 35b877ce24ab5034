"""A device's seat in a round: what it may send and read now, and how its answers are stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, and_, bindparam, insert, select

from archipel.errors import ConflictError, ForbiddenError, GoneError, NotFoundError
from archipel.protocol.messages import Protocol, Receipt
from archipel.server.database.tables import LIVE, Answer, Device, Participant, Round, Task
from archipel.server.database.task_requests import decode_request
from archipel.server.devices.revocation import require_active
from archipel.server.rounds.groups.grouping import group_size
from archipel.server.rounds.machine import ORDER, RULES

if TYPE_CHECKING:
    from archipel.server.services import Services


@dataclass(frozen=True)
class Seat:
    """One participant in one round, as it is at `now` (Unix seconds).

    `answers` maps the phases in which the device answered to the digests of what it sent. `buffer_ends`: in a buffered
    round, when the device's time is over (Unix seconds); else None. `task_over`: the state in which the task ended,
    empty while it is live. `left`: the device said that it will send nothing. `excluded`: a complaint put it out of
    the round, or too few hold its shares. `max_cohort` is the plan's, `protocol` that of a secure round.
    `staleness`: how many versions the task has made since the round's model.
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
    protocol: Protocol = "complete"
    population: str = ""
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
        """The phase to which the device's update belongs."""
        return "masking" if self.privacy == "secure" else "updating"

    def may_send(self, phase: str, digest: str) -> bool:
        """Decide whether the device may send a message of `phase` now.

        Arguments:
            phase: The phase to which the message belongs.
            digest: SHA-256 (hex) of the message's bytes.

        Returns:
            True: store it. False: these very bytes are stored already, and a repeated request gets the same answer.

        Raises:
            ConflictError: Another message is stored for the phase, or the round is not there yet.
            GoneError: The phase or the round is over, or the device is out of it.
        """
        stored = self.answers.get(phase)
        # A seat in a buffer outlives its round; `_require_time` says how long.
        if self.buffer_ends is None:
            self._require_live()
        # Before all other checks: a device that lost the answer to its request repeats it, maybe in a later phase.
        if stored == digest:
            return False
        if stored is not None:
            raise ConflictError(f"another message is stored for phase {phase}; a message cannot be replaced")
        if self.left:
            raise GoneError("this device has left the round")
        self._require_included()
        if self.buffer_ends is not None:
            # The phase of a buffered round does not matter: the update goes into whichever buffer is open.
            self._require_time()
            return True
        # Too early is a conflict, after which the device asks again; too late is gone, after which it gives up.
        if ORDER[self.phase] < ORDER[phase]:
            raise ConflictError(f"too early: the round is in phase {self.phase}, this belongs to {phase}")
        if ORDER[self.phase] > ORDER[phase]:
            raise GoneError(f"phase {phase} is over: the round is in phase {self.phase}")
        self._require_answer(RULES[phase].previous)
        return True

    def _require_time(self) -> None:
        """Raise GoneError unless this seat in a buffered round is still valid. It outlives its round."""
        if self.task_over:
            raise GoneError(f"the task is {self.task_over}")
        if self.now >= (self.buffer_ends or 0.0):
            raise GoneError("this device's time for the round is over")
        if self.staleness > self.max_staleness:
            raise GoneError(f"{self.staleness} versions were made meanwhile, the task allows {self.max_staleness}")

    def may_read(self, phase: str) -> None:
        """Raise ConflictError before `phase`, and GoneError if the round is over or the device dropped out of it."""
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
            why = (
                "a peer showed that it was sent no shares" if self.protocol == "complete" else "too few hold its shares"
            )
            raise GoneError(f"this device is out of the round: {why}")

    def _require_answer(self, phase: str | None) -> None:
        # Nothing is sent in phase assigning: every participant has passed it.
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
        Task.population,
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
    # Outer joins: there is a row also for a device without a seat, and for one that has sent nothing.
    .outerjoin(
        Participant, and_(Participant.round_id == Round.round_id, Participant.device_id == bindparam("seat_device"))
    )
    .outerjoin(Device, Device.device_id == Participant.device_id)
    .outerjoin(Answer, Answer.of(Round.round_id, Participant.device_id))
    .where(Round.round_id == bindparam("seat_round"))
)
# A shared lock of the round: handlers do not wait for each other, only for the coordinator's step, and it for them.
_LOCKED_SEAT = _SEAT.with_for_update(read=True, of=Round)


def find_seat(services: Services, round_id: str, device_id: str, *protocols: Protocol) -> Seat:
    """Look the seat up without a lock: it may have changed when this returns.

    Raises:
        NotFoundError: There is no such round, or it is of another protocol than these.
        ForbiddenError: The device is not in the round, or was revoked.
    """
    rows = services.database.look_all(_SEAT, seat_round=round_id, seat_device=device_id)
    seat = _seat(rows, round_id, device_id, services.clock())
    if protocols and seat.protocol not in protocols:
        raise NotFoundError(f"there is no such thing in a round of protocol {seat.protocol!r}")
    return seat


def take_seat(connection: Connection, round_id: str, device_id: str, *, now: float) -> Seat:
    """Look the seat up and keep the round in its phase until the transaction ends. Raises as `find_seat`."""
    rows = connection.execute(_LOCKED_SEAT, {"seat_round": round_id, "seat_device": device_id}).all()
    return _seat(rows, round_id, device_id, now)


def _seat(rows: Sequence[Any], round_id: str, device_id: str, now: float) -> Seat:
    if not rows:
        raise NotFoundError(f"no round {round_id}")
    row = rows[0]
    if row.device_id is None:
        raise ForbiddenError("this device is not in the round")
    # The session may come from a cache that does not know yet that the device was revoked.
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
        # One row for each answer of the device, and a single one with nulls if it has sent nothing.
        answers={each.answered: each.answer for each in rows if each.answered is not None},
        privacy=row.privacy,
        protocol=decode_request(row.request).protocol or "complete",
        population=row.population,
        buffer_ends=row.ends,
        left=row.left is not None,
        excluded=row.excluded is not None,
        max_cohort=group_size(decode_request(row.request)),
        task_over="" if row.state in LIVE else row.state,
        now=now,
        # A round's number is that of the version it makes, so one above the number of the version it began with.
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
    """Record that the device answered. Durable when it returns, so the device's request can be acknowledged then.

    Arguments:
        services: The server's database and clock.
        seat: The seat as `find_seat` gave it; it is looked up again under the lock.
        phase: The phase in which the device answers.
        digest: SHA-256 (hex) of the message's bytes.
        size: Length of the message in bytes.
        body: The message, or None if it is stored elsewhere (updates in the spool, shares in their own table).
        also: Further writes of the same transaction. Not called if the same message is stored already.

    Raises:
        RefusalError: The phase ended meanwhile, or another message is stored.
    """
    row = {
        "round_id": seat.round_id,
        "phase": phase,
        "device_id": seat.device_id,
        "digest": digest,
        "size": size,
        "body": body,
        "received": services.clock(),
        "fetched": services.fetched.take(seat.device_id),
    }

    def store(connection: Connection) -> Receipt:
        # `may_send` comes before any write, as `Database.together` demands of work that may raise RefusalError.
        locked_seat = take_seat(connection, seat.round_id, seat.device_id, now=services.clock())
        if locked_seat.may_send(phase, digest):
            connection.execute(_STORE, row)
            if also is not None:
                also(connection)
        return Receipt()

    return services.database.together(store)


_STORE = insert(Answer)
