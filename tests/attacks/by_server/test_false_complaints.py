"""A server, with or without colluding devices, uses complaints against honest devices.

It wants honest devices out of a round (a smaller sum tells more), wants keys of envelopes between honest devices, or
two groups that unmask different sums. What stops it: a complaint holds only with the sender's own signature and the one
key that the recipient advertised for this sender; a device that sees its complaint suppressed sends nothing; and what
members confirm contains the list that they saw. A round then fails, with nothing revealed, and nobody is blamed.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from archipel.errors import CertificateError, ConsistencyError, ProtocolError, SecureAggregationError, ShareError
from archipel.protocol.messages import Complaint, Complaints, EncryptedShare, Shares
from archipel.protocol.secagg import check_complaint, keys, read_session
from tests.support.rounds import Round

NONE = Complaints(complaints=[])


@pytest.fixture
def shared() -> Round:
    """Seven devices that have sent each other their envelopes."""
    round_ = Round(7, threshold=5)
    round_.advertise()
    round_.share()
    return round_


def sent(round_: Round, sender: int, recipient: int) -> EncryptedShare:
    [found] = [share for share in round_.sent[sender].shares if share.peer == round_.ids[recipient]]
    return found


def complaint(round_: Round, complainer: int, accused: int, **changes: Any) -> Complaint:
    """About the envelope that `accused` really sent. The complainer uses its own secret, which it knows."""
    session, device = read_session(round_.cohort, round_.plan), round_.devices[complainer]
    place = session.peers[round_.ids[accused]].place
    envelope = sent(round_, accused, complainer)
    fields = {
        "complainer": round_.ids[complainer], "accused": round_.ids[accused], "ciphertext": envelope.ciphertext,
        "signature": envelope.signature, "key": device._envelope_private(place), "path": device._tree.path(place),
    }  # fmt: skip
    return Complaint(**{**fields, **changes})


def test_a_server_that_garbles_an_envelope_makes_nobody_complain(shared: Round) -> None:
    """The recipient leaves, since it could not answer for that sender; there is no complaint for others to see."""
    for changes in ({"ciphertext": bytes(94)}, {"signature": bytes(64)}):
        inbox = shared.inbox(0)
        garbled = msgspec.structs.replace(inbox.shares[0], **changes)
        with pytest.raises(CertificateError, match="does not verify"):
            shared.devices[0].complain(Shares(shares=[garbled, *inbox.shares[1:]]))
        with pytest.raises(SecureAggregationError, match="left the round"):
            shared.devices[0].mask(shared.vectors[0], NONE)
        shared.devices[0] = shared.participant(0, "round")
        shared.devices[0].advertise()
        shared.devices[0].share(shared.cohort_for(0))


HONEST, COLLUDER, OTHER = 1, 5, 6


def framing(round_: Round, attempt: str) -> Complaint:
    """What the colluder can put together about the honest device, whose envelope is all right."""
    device = round_.devices[COLLUDER]
    other = read_session(round_.cohort, round_.plan).peers[round_.ids[OTHER]].place
    theirs = sent(round_, HONEST, OTHER)
    changes: dict[str, Any] = {
        "its own key, and the envelope opens": {},
        "a key that it made up": {"key": keys.clamp(b"k" * 32)},
        "its key for another sender": {"key": device._envelope_private(other), "path": device._tree.path(other)},
        "an envelope that it made up": {"ciphertext": bytes(94)},
        "an envelope with its own signature": {"signature": sent(round_, COLLUDER, HONEST).signature},
        "an envelope for somebody else": {"ciphertext": theirs.ciphertext, "signature": theirs.signature},
        "in the name of an honest device": {"complainer": round_.ids[2]},
    }[attempt]
    return msgspec.structs.replace(complaint(round_, COLLUDER, HONEST), **changes)


@pytest.mark.parametrize(
    ("attempt", "error", "text"),
    [
        ("its own key, and the envelope opens", ShareError, "opens"),
        ("a key that it made up", ShareError, "advertised"),
        ("its key for another sender", ShareError, "advertised"),
        ("an envelope that it made up", CertificateError, "signature"),
        ("an envelope with its own signature", CertificateError, "signature"),
        ("an envelope for somebody else", CertificateError, "signature"),
        ("in the name of an honest device", CertificateError, "signature"),
    ],
)
@pytest.mark.sampled(every=6)
def test_a_colluder_cannot_frame_an_honest_sender(
    shared: Round, attempt: str, error: type[Exception], text: str
) -> None:
    """An honest server refuses the complaint. Devices that are shown it all the same leave, and blame nobody."""
    false = framing(shared, attempt)
    shared.complain()
    with pytest.raises(error, match=text):
        check_complaint(false, read_session(shared.cohort, shared.plan))
    for device, vector in zip(shared.devices, shared.vectors):
        with pytest.raises(error, match=text):
            device.mask(vector, Complaints(complaints=[false]))
        assert device._held == {}  # it has left, and keeps nothing


def test_a_server_that_forges_a_complaint(shared: Round) -> None:
    """It has every envelope, and the public keys with their paths, but no private one."""
    shared.complain()
    session = read_session(shared.cohort, shared.plan)
    place = session.peers[shared.ids[1]].place
    public = shared.requests[0].envelope_keys[32 * place :][:32]
    for key in (public, bytes(32), b"k" * 32, keys.clamp(b"k" * 32)):
        forged = complaint(shared, 0, 1, key=key, path=shared.cohort_for(1).keys[0].path)
        with pytest.raises(ShareError):
            check_complaint(forged, session)


def test_a_server_that_keeps_a_complaint_back_from_all(shared: Round) -> None:
    """The complainer sees that it is missing, and leaves before its vector does. The others go on without it."""
    shared.spoil(6, [0])
    assert len(shared.complain().complaints) == 1
    with pytest.raises(ConsistencyError, match="about which this device complained"):
        shared.devices[0].mask(shared.vectors[0], NONE)
    shared.complaints = dict.fromkeys(range(1, 7), NONE)
    shared.mask(range(1, 7))
    answers = shared.unmask(shared.confirm(range(1, 7)), range(1, 7))
    assert shared.sum(answers).tolist() == shared.plain_sum()


def test_a_server_that_shows_a_complaint_to_some_only(shared: Round) -> None:
    """It colludes with the last two. Neither group is large enough, whatever these two sign for each."""
    shared.spoil(6, [5])
    shown = shared.complain()
    assert len(shown.complaints) == 1
    for i in range(5):
        shared.masked[i] = shared.devices[i].mask(shared.vectors[i], shown if i < 3 else NONE)
    confirmations = shared.confirm(range(5))
    for i in range(5):
        with pytest.raises(ConsistencyError, match="different complaints"):
            shared.devices[i].unmask(confirmations)
        assert shared.devices[i]._held == {}


def test_colluders_who_complain_about_each_other_only_leave(shared: Round) -> None:
    """The sum of the others is exact, and nothing of it depends on the two."""
    shared.spoil(5, [6])
    shared.spoil(6, [5])
    accused = {each.accused for each in shared.complain().complaints}
    assert accused == {shared.ids[5], shared.ids[6]}
    shared.mask(range(5))
    answers = shared.unmask(shared.confirm(range(5)), range(5))
    assert shared.sum(answers).tolist() == shared.plain_sum()
    assert len(shared.masked) == 5


def test_the_accused_sends_nothing(shared: Round) -> None:
    shared.spoil(6, [0])
    complaints = shared.complain()
    with pytest.raises(ProtocolError, match="this device is accused"):
        shared.devices[6].mask(shared.vectors[6], complaints)
