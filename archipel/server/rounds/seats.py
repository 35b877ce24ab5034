"""A device's seat in a round: what it may send and read now."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sqlalchemy import ColumnElement, Connection, and_, bindparam, select

from archipel.errors import ConflictError, ForbiddenError, GoneError, NotFoundError, RefusalError
from archipel.protocol.messages import Protocol
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


_SEATS = (
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
    .where(Round.round_id == bindparam("seat_round"))
)


def _seats_of(devices: ColumnElement[bool]) -> Any:
    # Outer joins: there is a row also for a device without a seat, and for one that has sent nothing.
    return (
        _SEATS.outerjoin(Participant, and_(Participant.round_id == Round.round_id, devices))
        .outerjoin(Device, Device.device_id == Participant.device_id)
        .outerjoin(Answer, Answer.of(Round.round_id, Participant.device_id))
    )


_SEAT = _seats_of(Participant.device_id == bindparam("seat_device"))
# A shared lock of the round: handlers do not wait for each other, only for the coordinator's step, and it for them.
_LOCKED_SEAT = _SEAT.with_for_update(read=True, of=Round)
_LOCKED_SEATS = _seats_of(Participant.device_id.in_(bindparam("seat_devices", expanding=True))).with_for_update(
    read=True, of=Round
)


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


def take_seats(
    connection: Connection, round_id: str, device_ids: Collection[str], *, now: float
) -> dict[str, Seat | RefusalError]:
    """As `take_seat`, of several devices in one query: the seat of each, or the error that `take_seat` raises."""
    found = connection.execute(_LOCKED_SEATS, {"seat_round": round_id, "seat_devices": sorted(device_ids)}).all()
    rows: dict[str, list[Any]] = {}
    for row in found:
        rows.setdefault(row.device_id, []).append(row)
    seats: dict[str, Seat | RefusalError] = {}
    for device_id in device_ids:
        try:
            seats[device_id] = _seat(rows.get(device_id, []), round_id, device_id, now, exists=bool(found))
        except RefusalError as error:
            seats[device_id] = error
    return seats


def _seat(rows: Sequence[Any], round_id: str, device_id: str, now: float, *, exists: bool = False) -> Seat:
    """`exists`: there is such a round, also if there are no rows."""
    if not rows and not exists:
        raise NotFoundError(f"no round {round_id}")
    if not rows or rows[0].device_id is None:
        raise ForbiddenError("this device is not in the round")
    row = rows[0]
    # The session may come from a cache that does not know yet that the device was revoked.
    require_active(device_id, row.revoked)
    request = decode_request(row.request)
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
        protocol=request.protocol or "complete",
        population=row.population,
        buffer_ends=row.ends,
        left=row.left is not None,
        excluded=row.excluded is not None,
        max_cohort=group_size(request),
        task_over="" if row.state in LIVE else row.state,
        now=now,
        # A round's number is that of the version it makes, so one above the number of the version it began with.
        staleness=max(row.rounds_committed + 1 - row.number, 0),
        max_staleness=0 if row.ends is None else request.max_staleness,
    )
