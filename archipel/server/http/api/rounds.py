"""The devices' messages in a secure round (the masked update is in `updates`), and leaving a round of any kind.

Each handler checks the device's seat, verifies the message against what the round has settled, and stores it. None of
them changes the round's phase.
"""

from __future__ import annotations

import hashlib
from typing import Any

from sqlalchemy import Connection, and_, bindparam, insert, select, update

from archipel.errors import SecureAggregationError
from archipel.protocol.messages import (
    Advertisement,
    AdvertiseRequest,
    Cohort,
    Complaints,
    Confirmation,
    Confirmations,
    ConfirmRequest,
    EncryptedShare,
    LeaveRequest,
    Receipt,
    RoundStatus,
    RoundTask,
    Shares,
    Survivors,
    Unmasking,
)
from archipel.protocol.sealed import decode, encode
from archipel.protocol.secagg import (
    check_advertisement,
    check_complaints,
    check_confirmation,
    check_envelope_keys,
    check_shares,
    check_unmasking,
    survivors_digest,
)
from archipel.server.database.tables import Participant, Round, Share, Task
from archipel.server.database.task_requests import decode_request
from archipel.server.devices.faults import note_fault
from archipel.server.devices.rests import let_rest
from archipel.server.http.problems import refuse, refusing
from archipel.server.http.routes import DEVICE, READ, B, Call, Route
from archipel.server.rounds.answering import store_answer
from archipel.server.rounds.refusals import count_refusal
from archipel.server.rounds.seats import find_seat, take_seat

_STATUS = (
    select(
        Round.phase,
        Round.phase_ends,
        Round.reason,
        Round.number,
        Round.complaints,
        Participant.device_id,
        Task.population,
        Task.mode,
        Task.rounds_committed,
    )
    .join(Task, Task.task_id == Round.task_id)
    .outerjoin(
        Participant, and_(Participant.round_id == Round.round_id, Participant.device_id == bindparam("device_id"))
    )
    .where(Round.round_id == bindparam("round_id"))
)


def round_status(call: Call[None], round_id: str) -> RoundStatus:
    """The round's phase, when its deadline passes, and when to ask again."""
    row = call.services.database.look(_STATUS, round_id=round_id, device_id=call.identity.device_id)
    if row is None or not call.identity.may(row.population):
        raise refuse(404, f"no round {round_id}")
    if call.identity.role == "device" and row.device_id is None:
        raise refuse(403, "this device is not in the round")
    return RoundStatus(
        round_id=round_id,
        phase=row.phase,
        phase_ends=row.phase_ends,
        reason=row.reason,
        retry_after=call.services.pace.in_round(call.services.clock()),
        complaints=row.complaints,
        staleness=max(row.rounds_committed + 1 - row.number, 0) if row.mode == "asynchronous" else 0,
    )


_TASK = (
    select(Task.task_id, Task.state, Task.request, Task.rounds_committed, Task.population, Participant.device_id)
    .join(Round, Round.task_id == Task.task_id)
    .outerjoin(
        Participant, and_(Participant.round_id == Round.round_id, Participant.device_id == bindparam("device_id"))
    )
    .where(Round.round_id == bindparam("round_id"))
)


def task_of_round(call: Call[None], round_id: str) -> RoundTask:
    """How the task of a round goes that this device was in. An edge server ends its own task with it."""
    row = call.services.database.look(_TASK, round_id=round_id, device_id=call.identity.device_id)
    if row is None or not call.identity.may(row.population):
        raise refuse(404, f"no round {round_id}")
    if row.device_id is None:
        raise refuse(403, "this device is not in the round")
    rounds = decode_request(row.request).rounds
    return RoundTask(task_id=row.task_id, state=row.state, rounds=rounds, committed=row.rounds_committed)


def advertise(call: Call[AdvertiseRequest], round_id: str) -> Receipt:
    """Advertise round keys, signed by the device."""
    seat, digest = find_seat(call.services, round_id, call.identity.device_id, "complete"), _digest(call)
    if not seat.may_send("advertising", digest):
        return Receipt()
    sealed = call.body.advertisement
    with refusing(422):
        try:
            advertised = check_advertisement(sealed, seat.device_key, round_id, seat.plan_digest)
            check_envelope_keys(advertised, call.body.envelope_keys, seat.max_cohort)
        except SecureAggregationError:
            # A fault of the device: it has signed the advertisement, and with the root in it the envelope keys (other
            # keys are a MessageError). An advertisement for another round may be replayed by somebody else.
            if decode("advertisement", sealed.body, Advertisement).plan == seat.plan_digest:
                _note(call, round_id, "forbidden keys advertised")
            raise
    body = encode(call.body)
    return store_answer(call.services, seat, "advertising", digest=digest, size=len(call.raw), body=body)


def leave(call: Call[LeaveRequest], round_id: str) -> Receipt:
    """Leave the round: it does not wait for what this device would still have to send. What it has sent counts.

    A buffered round never waits for single devices; there the device keeps its seat until its time is over. Of a device
    that has sent nothing yet the reason, if it gives one, is counted, and such rounds do not take it again for a while.
    """
    device_id = call.identity.device_id

    def store(connection: Connection) -> Receipt:
        now = call.services.clock()
        # An exclusive lock of the round, where messages take a shared one: no message of this device can be stored
        # between the check of its answers and the note that it has left.
        connection.execute(_ALONE, {"in_round": round_id})
        seat = take_seat(connection, round_id, device_id, now=now)
        if not seat.left and seat.buffer_ends is None:
            connection.execute(_LEAVE, {"in_round": round_id, "leaving": device_id, "at": now})
        # After its first message a device leaves because of the round, such as for what its peers sent.
        if not seat.answers and count_refusal(connection, round_id, device_id, call.body.reason, now):
            let_rest(connection, round_id, device_id, first=call.services.settings.leave_seconds, now=now)
        return Receipt()

    return call.services.database.together(store)


_ALONE = select(Round.round_id).where(Round.round_id == bindparam("in_round")).with_for_update()
_LEAVE = (
    update(Participant)
    .where(Participant.round_id == bindparam("in_round"), Participant.device_id == bindparam("leaving"))
    .values(left=bindparam("at"))
)


def cohort(call: Call[None], round_id: str) -> bytes:
    """U1: everybody who advertised keys, with proofs of who they are, and the keys for this device's envelopes."""
    device_id = call.identity.device_id
    # First: before this phase U1 may still grow, and `frozen` would remember a part of it as the whole.
    find_seat(call.services, round_id, device_id, "complete").may_read("sharing")
    with call.services.database.read() as session:
        return call.services.frozen.cohort(session, round_id).message(device_id)


def send_shares(call: Call[Shares], round_id: str) -> Receipt:
    """Send encrypted secret shares, one for every other member of U1, each of them signed."""
    digest = _digest(call)
    seat = find_seat(call.services, round_id, call.identity.device_id, "complete")
    # Before the signatures of as many envelopes as the cohort has members: a repeated message costs no check.
    if not seat.may_send("sharing", digest):
        return Receipt()
    with call.services.database.read() as session:
        frozen = call.services.frozen.cohort(session, round_id)
    with refusing(422):
        check_shares(call.body, seat.device_id, frozen.session)
    rows = [
        {
            "round_id": round_id,
            "recipient": share.peer,
            "sender": seat.device_id,
            "ciphertext": share.ciphertext,
            "signature": share.signature,
        }
        for share in call.body.shares
    ]

    def store_shares(connection: Connection) -> None:
        connection.execute(insert(Share), rows)

    # In the transaction of the answer: a device that counts as having shared has an envelope there for every peer.
    return store_answer(call.services, seat, "sharing", digest=digest, size=len(call.raw), also=store_shares)


def inbox(call: Call[None], round_id: str) -> Shares:
    """The encrypted shares that the other members of U2 sent to this device."""
    device_id = call.identity.device_id
    query = select(Share.sender, Share.ciphertext, Share.signature).where(
        Share.round_id == round_id, Share.recipient == device_id
    )
    find_seat(call.services, round_id, device_id, "complete").may_read("complaining")
    with call.services.database.read() as session:
        rows = session.execute(query.order_by(Share.sender)).all()
    if not rows:  # the round may have ended in between, which deletes its shares; then the answer is 410
        find_seat(call.services, round_id, device_id, "complete").may_read("complaining")
    return Shares(
        shares=[EncryptedShare(peer=row.sender, ciphertext=row.ciphertext, signature=row.signature) for row in rows]
    )


def complain(call: Call[Complaints], round_id: str) -> Receipt:
    """Report that the device has opened its envelopes, with a complaint and its proof for each one without shares."""
    digest = _digest(call)
    seat = find_seat(call.services, round_id, call.identity.device_id, "complete")
    if not seat.may_send("complaining", digest):
        return Receipt()
    with call.services.database.read() as session:
        frozen = call.services.frozen.cohort(session, round_id)
    if any(complaint.complainer != seat.device_id for complaint in call.body.complaints):
        raise refuse(422, "complaints: a device complains of what was sent to itself")
    with refusing(422):
        check_complaints(call.body, frozen.session)
    return store_answer(call.services, seat, "complaining", digest=digest, size=len(call.raw), body=encode(call.body))


def complaints(call: Call[None], round_id: str) -> bytes:
    """One complaint about each accused device. Accused devices are out of the round."""
    find_seat(call.services, round_id, call.identity.device_id, "complete").may_read("masking")
    with call.services.database.read() as session:
        return call.services.frozen.complaints(session, round_id).message


def survivors(call: Call[None], round_id: str) -> bytes:
    """U3: the devices whose masked updates are in the sum."""
    find_seat(call.services, round_id, call.identity.device_id, "complete").may_read("confirming")
    with call.services.database.read() as session:
        return call.services.frozen.survivors(session, round_id).message


def confirm(call: Call[ConfirmRequest], round_id: str) -> Receipt:
    """Confirm the set of survivors and the list of complaints, signed by the device."""
    digest = _digest(call)
    seat = find_seat(call.services, round_id, call.identity.device_id, "complete")
    if not seat.may_send("confirming", digest):
        return Receipt()
    with call.services.database.read() as session:
        frozen = call.services.frozen
        # What the server has settled, not what most devices say: all confirmations that it stores are the same bytes.
        expected = Confirmation(
            round_id=round_id,
            plan=seat.plan_digest,
            cohort=frozen.cohort(session, round_id).session.cohort,
            complaints=frozen.complaints(session, round_id).digest,
            survivors=survivors_digest(frozen.survivors(session, round_id).survivors),
        )
    with refusing(422):
        check_confirmation(call.body.confirmation, seat.device_key, expected)
    body = encode(call.body.confirmation)
    return store_answer(call.services, seat, "confirming", digest=digest, size=len(call.raw), body=body)


def confirmations(call: Call[None], round_id: str) -> bytes:
    """U4: the survivors' signatures under the same set."""
    find_seat(call.services, round_id, call.identity.device_id, "complete").may_read("unmasking")
    with call.services.database.read() as session:
        return call.services.frozen.confirmations(session, round_id)


def unmask(call: Call[Unmasking], round_id: str) -> Receipt:
    """Send the share of each survivor's seed, and the share of each dropped device's mask key."""
    digest = _digest(call)
    seat = find_seat(call.services, round_id, call.identity.device_id, "complete")
    if not seat.may_send("unmasking", digest):
        return Receipt()
    with call.services.database.read() as session:
        frozen = call.services.frozen.survivors(session, round_id)
    with refusing(422):
        check_unmasking(call.body, seat.device_id, frozen.sharers, frozen.survivors.devices)
    return store_answer(call.services, seat, "unmasking", digest=digest, size=len(call.raw), body=encode(call.body))


def _note(call: Call[Any], round_id: str, reason: str) -> None:
    """Note a fault of the calling device in a transaction of its own, because its message is refused and not stored."""
    services = call.services
    with services.database.write() as session:
        note_fault(
            session, device_id=call.identity.device_id, round_id=round_id, reason=reason, now=services.clock()
        )  # fmt: skip


def _digest(call: Call[B]) -> str:
    return hashlib.sha256(call.raw).hexdigest()


_ROUND = "/v1/rounds/<id:round_id>"

ROUTES = (
    Route("GET", _ROUND, DEVICE | READ, round_status, response=RoundStatus, members=True),
    Route("GET", f"{_ROUND}/task", DEVICE, task_of_round, response=RoundTask, members=True),
    Route("POST", f"{_ROUND}/leave", DEVICE, leave, LeaveRequest, Receipt, members=True),
    Route("PUT", f"{_ROUND}/advertisement", DEVICE, advertise, AdvertiseRequest, Receipt, members=True),
    Route("GET", f"{_ROUND}/cohort", DEVICE, cohort, response=Cohort, members=True),
    Route("PUT", f"{_ROUND}/shares", DEVICE, send_shares, Shares, Receipt, members=True),
    Route("GET", f"{_ROUND}/shares", DEVICE, inbox, response=Shares, members=True),
    Route("PUT", f"{_ROUND}/complaints", DEVICE, complain, Complaints, Receipt, members=True),
    Route("GET", f"{_ROUND}/complaints", DEVICE, complaints, response=Complaints, members=True),
    Route("GET", f"{_ROUND}/survivors", DEVICE, survivors, response=Survivors, members=True),
    Route("PUT", f"{_ROUND}/confirmation", DEVICE, confirm, ConfirmRequest, Receipt, members=True),
    Route("GET", f"{_ROUND}/confirmations", DEVICE, confirmations, response=Confirmations, members=True),
    Route("PUT", f"{_ROUND}/unmasking", DEVICE, unmask, Unmasking, Receipt, members=True),
)
