"""Complaints, key trees and keys of small order: what holds, and what no complaint can show."""

from __future__ import annotations

import hashlib

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from hypothesis import given, settings
from hypothesis import strategies as st

from archipel.errors import (
    CertificateError,
    ConsistencyError,
    MessageError,
    SecureAggregationError,
    ShareError,
    ThresholdError,
)
from archipel.protocol import check_advertisement, public_bytes, seal
from archipel.protocol.messages import Advertisement, Complaints, EncryptedShare, Shares
from archipel.protocol.sealed import decode
from archipel.protocol.secagg import KeyTree, check_complaint, check_complaints, check_envelope_keys, read_session
from archipel.protocol.secagg import keys as round_keys
from archipel.protocol.secagg.envelope import open_shares, seal_shares, sign_envelope
from archipel.protocol.secagg.key_tree import depth, is_under

# https://cr.yp.to/ecdh.html#validate, with every spelling below 2^256.
P = 2**255 - 19
ORDER_8 = (
    325606250916557431795983626356110631294008115727848805560023387167927233504,
    39382357235489614581723060781553021112529911719440698176882885853963445705823,
)
SMALL = [
    (u + high).to_bytes(32, "little") for u in (0, 1, *ORDER_8, P - 1, P, P + 1) for high in (0, 2**255)
]  # fmt: skip


@pytest.mark.parametrize("public", SMALL, ids=bytes.hex)
def test_keys_of_small_order(public, fixed):
    with pytest.raises(ValueError):
        X25519PrivateKey.from_private_bytes(fixed("any")).exchange(X25519PublicKey.from_public_bytes(public))
    assert round_keys.is_small_order(public)


@pytest.mark.parametrize("number", [2, 9, P - 2, P + 2, *(u + 1 for u in ORDER_8)])
def test_keys_of_large_order(number, fixed):
    public = number.to_bytes(32, "little")
    X25519PrivateKey.from_private_bytes(fixed("any")).exchange(X25519PublicKey.from_public_bytes(public))
    assert not round_keys.is_small_order(public)


@pytest.mark.parametrize("name", ["cipher_key", "mask_key"])
def test_an_advertised_key_of_small_order(make_round, name):
    round_ = make_round(3)
    round_.advertise()
    body = decode("advertisement", round_.requests[0].advertisement.body, Advertisement)
    sealed = seal("advertisement", msgspec.structs.replace(body, **{name: SMALL[4]}), round_.keys[0])
    with pytest.raises(SecureAggregationError, match=f"{name}.*small order"):
        check_advertisement(sealed, public_bytes(round_.keys[0]), round_.plan.round_id, round_.digest)


def test_envelope_keys_are_those_under_the_root(make_round):
    round_ = make_round(3)
    round_.advertise()
    request = round_.requests[0]
    body = decode("advertisement", request.advertisement.body, Advertisement)
    assert check_envelope_keys(body, request.envelope_keys, 3).root == body.envelope_root
    swapped = request.envelope_keys[32:64] + request.envelope_keys[:32] + request.envelope_keys[64:]
    for wrong in (
        swapped,
        request.envelope_keys[:64],
        request.envelope_keys + bytes(32),
        request.envelope_keys[1:],
        b"",
    ):
        with pytest.raises(MessageError, match="envelope keys"):
            check_envelope_keys(body, wrong, 3)
    small = request.envelope_keys[:64] + SMALL[0]
    honest_root = msgspec.structs.replace(body, envelope_root=KeyTree(small, 3).root)
    with pytest.raises(SecureAggregationError, match="place 2 is of small order"):
        check_envelope_keys(honest_root, small, 3)


def leaf(key: bytes) -> bytes:
    return hashlib.sha256(b"archipel/v1/envelope-leaf\0" + key).digest()


def node(pair: bytes) -> bytes:
    return hashlib.sha256(b"archipel/v1/envelope-node\0" + pair).digest()


def test_a_tree_by_hand():
    a, b, c = b"a" * 32, b"b" * 32, b"c" * 32
    left, right = node(leaf(a) + leaf(b)), node(leaf(c) + bytes(32))
    made = KeyTree(a + b + c, 3)
    assert made.root == node(left + right)
    assert made.path(0) == leaf(b) + right
    assert made.path(2) == bytes(32) + left
    assert KeyTree(a, 1).root == leaf(a)
    assert [depth(leaves) for leaves in (1, 2, 3, 4, 5, 4096)] == [0, 1, 2, 2, 3, 12]


@pytest.mark.sampled(every=3)
@settings(max_examples=50)
@given(leaves=st.integers(1, 20), data=st.data())
def test_a_path_is_for_one_key_at_one_place(leaves, data):
    found = b"".join(hashlib.sha256(bytes([i])).digest() for i in range(leaves))
    made = KeyTree(found, leaves)
    place = data.draw(st.integers(0, leaves - 1))
    key, path = made.key(place), made.path(place)
    assert is_under(made.root, key, place, path, leaves)
    for other in range(-1, leaves + 1):
        if other != place:
            assert not is_under(made.root, key, other, path, leaves)
    assert not is_under(made.root, bytes(32), place, path, leaves)
    assert not is_under(made.root, key, place, path + bytes(32), leaves)
    if path:
        at = data.draw(st.integers(0, len(path) - 1))
        changed = path[:at] + bytes([path[at] ^ 1]) + path[at + 1 :]
        assert not is_under(made.root, key, place, changed, leaves)
        # An inner node is no key, though a path leads from it to the root.
        inner = node(leaf(key) + path[:32]) if place % 2 == 0 else node(path[:32] + leaf(key))
        assert not is_under(made.root, inner, place // 2, path[32:], leaves)


def test_the_round_goes_on_without_the_accused(make_round):
    round_ = make_round(5, threshold=3)
    round_.advertise()
    round_.share()
    round_.spoil(4, [0, 2])
    list_ = round_.complain(range(4))
    assert [(each.accused, each.complainer) for each in list_.complaints] == [
        (round_.ids[4], min(round_.ids[0], round_.ids[2]))
    ]
    round_.mask([0, 1, 2])  # and another one drops out
    answers = round_.unmask(round_.confirm([0, 1, 2]), [0, 1, 2])
    assert round_.sum(answers).tolist() == round_.plain_sum()
    for answer in answers.values():
        assert round_.ids[4] not in {share.device for share in (*answer.self_seeds, *answer.mask_keys)}


def test_shares_that_are_none_are_a_fault_too(make_round):
    """An envelope that opens, and holds numbers beyond the prime."""
    round_ = make_round(4, threshold=3)
    round_.advertise()
    round_.share()
    session = read_session(round_.cohort, round_.plan)
    sender, recipient = session.peers[round_.ids[3]], session.peers[round_.ids[0]]
    public = round_.requests[0].envelope_keys[32 * sender.place :][:32]
    # The sender knows its own secret: here it is read from the test's stream.
    other = make_round(4, threshold=3)
    other.advertise()
    shared = round_keys.agree(other.devices[3]._cipher_secret, public)
    key = round_keys.envelope_key(shared, session.salt, sender.cipher_key, public)
    associated = session.associated(sender.device_id, recipient.device_id)
    ciphertext = seal_shares(key, bytes(12), b"\xff" * 33, bytes(33), associated)
    bad = EncryptedShare(
        peer=recipient.device_id, ciphertext=ciphertext, signature=sign_envelope(round_.keys[3], ciphertext, associated)
    )
    kept = [share for share in round_.sent[3].shares if share.peer != recipient.device_id]
    round_.sent[3] = Shares(shares=[bad, *kept])
    assert [each.accused for each in round_.complain(range(3)).complaints] == [sender.device_id]
    round_.mask(range(3))
    answers = round_.unmask(round_.confirm(range(3)), range(3))
    assert round_.sum(answers).tolist() == round_.plain_sum()


def test_too_few_are_left(make_round):
    round_ = make_round(4, threshold=3, min_cohort=4)
    round_.advertise()
    round_.share()
    round_.spoil(3, [0])
    with pytest.raises(ThresholdError, match="not accused: 3, the plan needs 4"):
        round_.mask([0])


def test_two_members_with_different_lists_do_not_unmask(make_round):
    """The server shows the complaint to some only. All of them confirm the same survivors; nobody reveals a share."""
    round_ = make_round(5, threshold=3)
    round_.advertise()
    round_.share()
    round_.spoil(4, [0])
    shown, none = round_.complain(range(4)), Complaints(complaints=[])
    for i, list_ in ((0, shown), (1, none), (2, none), (3, none)):
        round_.masked[i] = round_.devices[i].mask(round_.vectors[i], list_)
    confirmations = round_.confirm(range(4))
    for i in range(4):
        with pytest.raises(ConsistencyError, match="different complaints"):
            round_.devices[i].unmask(confirmations)


def test_a_complaint_is_of_one_session(make_round):
    round_, later = make_round(4, threshold=3), make_round(4, threshold=3, name="later")
    for each in (round_, later):
        each.advertise()
        each.share()
    round_.spoil(3, [0])
    (complaint,) = round_.complain(range(3)).complaints
    check_complaint(complaint, read_session(round_.cohort, round_.plan))
    with pytest.raises(CertificateError):
        check_complaint(complaint, read_session(later.cohort, later.plan))


def test_the_key_in_a_complaint_opens_nothing_else(make_round):
    """Neither what the accused sent to others, nor what others sent to the complainer, nor its own envelope back."""
    round_ = make_round(4, threshold=3)
    round_.advertise()
    round_.share()
    round_.spoil(3, [0])
    session = read_session(round_.cohort, round_.plan)
    (complaint,) = round_.complain(range(3)).complaints
    public = round_keys.public_key(complaint.key)
    leaves = [request.envelope_keys[32 * i :][:32] for request in round_.requests.values() for i in range(4)]
    assert leaves.count(public) == 1
    for sender in range(4):
        for share in round_.sent[sender].shares:
            name = round_.ids[sender]
            for peer in session.peers.values():
                for pair in ((peer.cipher_key, public), (public, peer.cipher_key)):
                    key = round_keys.envelope_key(round_keys.agree(complaint.key, peer.cipher_key), session.salt, *pair)
                    with pytest.raises(ShareError):
                        open_shares(key, share.ciphertext, session.associated(name, share.peer), name)


def test_a_list_has_one_spelling(make_round):
    round_ = make_round(6, threshold=4)
    round_.advertise()
    round_.share()
    round_.spoil(4, [0, 1])
    round_.spoil(5, [0, 1])
    list_ = round_.complain(range(4))
    session = read_session(round_.cohort, round_.plan)
    assert check_complaints(list_, session) == {round_.ids[4], round_.ids[5]}
    for wrong in (list_.complaints[::-1], [list_.complaints[0]] * 2):
        with pytest.raises(ConsistencyError, match="sorted"):
            check_complaints(Complaints(complaints=wrong), session)
