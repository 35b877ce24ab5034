"""The devices' messages in a secure round over neighbours, in MessagePack; the masked update is in `updates`.

Each handler checks the device's seat, verifies the message against what the round has settled, and stores it. None of
them changes the round's phase.
"""

from __future__ import annotations

import hashlib
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from sqlalchemy import bindparam, select

from archipel.errors import GoneError, SecureAggregationError
from archipel.protocol.messages import Chain, Protocol, Receipt
from archipel.protocol.sealed import decode
from archipel.protocol.secagg_plus.envelope import bind
from archipel.protocol.secagg_plus.inclusion import presence
from archipel.protocol.secagg_plus.member import Member, read_member
from archipel.protocol.secagg_plus.member import Session as RoundSession
from archipel.protocol.secagg_plus.messages import (
    SIGNATURE_BYTES,
    Answer,
    Confirmed,
    Dealt,
    Drawn,
    Inbox,
    Inclusions,
    Invitation,
    Neighbours,
    Partners,
    Question,
    Refused,
)
from archipel.protocol.secagg_plus.roster import check_answer
from archipel.protocol.secagg_plus.terms import agreement_of
from archipel.server.database.tables import Device
from archipel.server.devices.faults import note_fault
from archipel.server.http.problems import refuse, refusing
from archipel.server.http.routes import DEVICE, B, Call, Route
from archipel.server.rounds.answering import store_answer
from archipel.server.rounds.neighbours.frozen_roster import FrozenRoster
from archipel.server.rounds.seats import Seat, find_seat

_CHAIN = select(Device.chain).where(Device.device_id == bindparam("device_id"))
PROTOCOLS: tuple[Protocol, ...] = ("neighbours", "neighbours-mlkem")


def join(call: Call[Member], round_id: str) -> Receipt:
    """Advertise round keys, as a member that the device has signed."""
    seat, digest = _seat(call, round_id), _digest(call)
    if not seat.may_send("advertising", digest):
        return Receipt()
    with refusing(422):
        try:
            key = call.services.settings.enrolment_public_key
            member, _ = read_member(
                call.raw, RoundSession(round_id, seat.plan_digest), key, seat.population,
                keys_bytes=agreement_of(seat.protocol).full_bytes, known=_enrolled_chain(call),
            )  # fmt: skip
        except SecureAggregationError:
            # A fault of the device: it has signed these keys for this very round.
            with call.services.database.write() as session:
                note_fault(
                    session, device_id=seat.device_id, round_id=round_id, reason="forbidden keys advertised",
                    now=call.services.clock(),
                )  # fmt: skip
            raise
    if (member.device_id, member.device_key) != (seat.device_id, seat.device_key):
        raise refuse(422, f"the member is device {member.device_id}, with a key that this one may have replaced")
    return _store(call, seat, "advertising", digest)


def invitation(call: Call[None], round_id: str) -> Invitation:
    """The size and the root of the cohort, and this device's place in it."""
    frozen, seat = _roster(call, round_id, "sharing")
    return frozen.roster.invite(frozen.place(seat.device_id))


def neighbours(call: Call[Drawn], round_id: str) -> Neighbours:
    """The members that this device drew, with a proof that they are in the cohort. The server keeps nothing of it."""
    frozen, seat = _roster(call, round_id, "sharing")
    with refusing(422):
        return frozen.roster.introduce(frozen.place(seat.device_id), call.body)


def deal(call: Call[Dealt], round_id: str) -> Receipt:
    """Send encrypted secret shares, one envelope for each neighbour that this device drew."""
    seat, digest = _seat(call, round_id), _digest(call)
    if not seat.may_send("sharing", digest):
        return Receipt()
    frozen = _frozen(call, round_id)
    with refusing(422):
        frozen.roster.check_dealt(frozen.place(seat.device_id), call.body)
    return _store(call, seat, "sharing", digest)


def envelopes(call: Call[None], round_id: str) -> Inbox:
    """The encrypted shares of everybody that drew this device."""
    frozen, seat = _roster(call, round_id, "complaining")
    with call.services.database.read() as session:
        return frozen.with_envelopes(session).inbox(frozen.place(seat.device_id))


def open_envelopes(call: Call[Refused], round_id: str) -> Receipt:
    """Report that the device has opened its envelopes, and whose it cannot accept."""
    seat, digest = _seat(call, round_id), _digest(call)
    if not seat.may_send("complaining", digest):
        return Receipt()
    frozen = _frozen(call, round_id)
    with call.services.database.read() as session:
        dealers = frozen.with_envelopes(session).dealers(frozen.place(seat.device_id))
    if not set(call.body.dealers) <= set(dealers):
        raise refuse(422, "refused: nobody at one of these places has dealt to this device")
    return _store(call, seat, "complaining", digest)


def partners(call: Call[None], round_id: str) -> Partners:
    """With whom this device shares masks."""
    frozen, seat = _roster(call, round_id, "masking")
    with call.services.database.read() as session:
        sharers = frozen.settled_sharers(session)
    place = frozen.place(seat.device_id)
    if place not in sharers:
        raise GoneError("this device is out of the round: too few hold its shares")
    return frozen.roster.pair(place, sharers)


def question(call: Call[None], round_id: str) -> Question:
    """Of which dealers this device is to show a share of the seed, and of which one of the mask key."""
    frozen, _ = _roster(call, round_id, "confirming")
    return _question(call, frozen)


def include(call: Call[Confirmed], round_id: str) -> Receipt:
    """Confirm the question; where the server may be malicious with a signature for each dealer that is present."""
    seat, digest = _seat(call, round_id), _digest(call)
    if not seat.may_send("confirming", digest):
        return Receipt()
    frozen = _frozen(call, round_id)
    asked = _question(call, frozen)
    expected = SIGNATURE_BYTES * len(asked.present) if frozen.malicious else 0
    # Single signatures are for the dealers to check: a wrong one does not count there.
    if len(call.body.signatures) != expected:
        raise refuse(422, f"confirmed: {len(call.body.signatures)} bytes of signatures, expected {expected}")
    return _store(call, seat, "confirming", digest)


def inclusions(call: Call[None], round_id: str) -> Inclusions:
    """The signatures of this device's neighbours that it is present; none where the server is semi-honest."""
    frozen, seat = _roster(call, round_id, "unmasking")
    with call.services.database.read() as session:
        questions, confirmed = frozen.questions(session)[1], frozen.confirmed(session)
    return frozen.roster.include(frozen.place(seat.device_id), questions, confirmed)


def answer(call: Call[Answer], round_id: str) -> Receipt:
    """Send the share of the seed of each dealer that is present, and that of the mask key of each that left."""
    seat, digest = _seat(call, round_id), _digest(call)
    if not seat.may_send("unmasking", digest):
        return Receipt()
    frozen = _frozen(call, round_id)
    with refusing(422):
        check_answer(_question(call, frozen), call.body, seat.device_id)
    try:
        key = Ed25519PublicKey.from_public_bytes(seat.device_key)
        key.verify(call.body.presence, presence(bind(frozen.session, frozen.roster.root)))
    except (InvalidSignature, ValueError):
        raise refuse(422, "answer: the signature that this device was present does not verify") from None
    return _store(call, seat, "unmasking", digest)


def _seat(call: Call[Any], round_id: str) -> Seat:
    return find_seat(call.services, round_id, call.identity.device_id, *PROTOCOLS)


def _enrolled_chain(call: Call[Any]) -> Chain:
    """The chain of the device that asks, which was verified when it enrolled or replaced its key."""
    row = call.services.database.look(_CHAIN, device_id=call.identity.device_id)
    assert row is not None, "a device that has a seat is enrolled"
    return decode("chain", row.chain, Chain)


def _frozen(call: Call[Any], round_id: str) -> FrozenRoster:
    with call.services.database.read() as session:
        return call.services.frozen.roster(session, round_id)


def _roster(call: Call[Any], round_id: str, phase: str) -> tuple[FrozenRoster, Seat]:
    """The round's cohort, for a device that may read what is there from `phase` on."""
    seat = _seat(call, round_id)
    # First: before this phase more may come, and what is frozen would be a part of it.
    seat.may_read(phase)
    return _frozen(call, round_id), seat


def _question(call: Call[Any], frozen: FrozenRoster) -> Question:
    with call.services.database.read() as session:
        return frozen.questions(session)[1][frozen.place(call.identity.device_id)]


def _store(call: Call[Any], seat: Seat, phase: str, digest: str) -> Receipt:
    return store_answer(call.services, seat, phase, digest=digest, size=len(call.raw), body=call.raw)


def _digest(call: Call[B]) -> str:
    return hashlib.sha256(call.raw).hexdigest()


_ROUND = "/v1/rounds/<id:round_id>"

ROUTES = (
    Route("PUT", f"{_ROUND}/member", DEVICE, join, Member, Receipt, members=True),
    Route("GET", f"{_ROUND}/invitation", DEVICE, invitation, response=Invitation, members=True),
    Route("POST", f"{_ROUND}/neighbours", DEVICE, neighbours, Drawn, Neighbours, members=True),
    Route("PUT", f"{_ROUND}/dealt", DEVICE, deal, Dealt, Receipt, members=True),
    Route("GET", f"{_ROUND}/inbox", DEVICE, envelopes, response=Inbox, members=True),
    Route("PUT", f"{_ROUND}/refused", DEVICE, open_envelopes, Refused, Receipt, members=True),
    Route("GET", f"{_ROUND}/partners", DEVICE, partners, response=Partners, members=True),
    Route("GET", f"{_ROUND}/question", DEVICE, question, response=Question, members=True),
    Route("PUT", f"{_ROUND}/inclusions", DEVICE, include, Confirmed, Receipt, members=True),
    Route("GET", f"{_ROUND}/inclusions", DEVICE, inclusions, response=Inclusions, members=True),
    Route("PUT", f"{_ROUND}/answer", DEVICE, answer, Answer, Receipt, members=True),
)
