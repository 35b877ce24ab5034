from __future__ import annotations

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from archipel.errors import MessageError, SecureAggregationError, ShareError
from archipel.protocol.secagg import envelope, keys, masks


def key_stream(key: bytes, length: int) -> np.ndarray:
    """AES of a big-endian counter, block by block, as little-endian words."""
    counters = np.zeros((length // 4 + 1, 2), ">u8")
    counters[:, 1] = np.arange(length // 4 + 1)
    blocks = Cipher(algorithms.AES(key), modes.ECB()).encryptor().update(counters.tobytes())
    return np.frombuffer(blocks, "<u4")[:length].astype(np.uint32)


@pytest.mark.parametrize("length", [0, 1, 3, 4, 5, 32_767, 32_768, 32_769, 100_001, 262_145, 600_001])
def test_the_mask_is_one_key_stream_whatever_the_length(fixed, length):
    vector = np.full(length, 2**32 - 5, np.uint32)
    masks.apply_mask(vector, fixed("key"), 1)
    np.testing.assert_array_equal(vector, key_stream(fixed("key"), length) - np.uint32(5))
    masks.apply_mask(vector, fixed("key"), -1)
    assert (vector == 2**32 - 5).all()


def test_pairs_cancel():
    assert {masks.pairwise_sign("a", "b"), masks.pairwise_sign("b", "a")} == {1, -1}
    assert masks.pairwise_sign("b", "a") == 1


def test_keys_differ_in_every_input(fixed):
    shared, one, other = fixed("shared"), fixed("one"), fixed("other")
    salts = [
        keys.round_salt("a" * 32, "b" * 64),
        keys.round_salt("a" * 32, "c" * 64),
        keys.round_salt("d" * 32, "b" * 64),
    ]
    derived = [
        *(keys.pairwise_mask_key(shared, salt, one, other) for salt in salts),
        keys.envelope_key(shared, salts[0], one, other),
        keys.self_mask_key(shared, salts[0], one),
        keys.pairwise_mask_key(fixed("another"), salts[0], one, other),
        keys.pairwise_mask_key(shared, salts[0], one, fixed("another")),
    ]
    assert len(set(derived)) == len(derived)
    assert keys.pairwise_mask_key(shared, salts[0], other, one) == derived[0]


@pytest.mark.parametrize(("round_id", "plan"), [("a" * 31, "b" * 64), ("a" * 32, "b" * 63), ("g" * 32, "b" * 64)])
def test_salts_of_strange_ids(round_id, plan):
    with pytest.raises(MessageError):
        keys.round_salt(round_id, plan)


# RFC 7748, section 7: points with which every agreement is zero.
@pytest.mark.parametrize(
    "point",
    [
        0,
        1,
        325606250916557431795983626356110631294008115727848805560023387167927233504,
        39382357235489614581723060781553021112529911719440698176882885853963445705823,
        2**255 - 20,
        2**255 - 19,
        2**255 - 18,
    ],
)
def test_points_of_small_order_are_refused(fixed, point):
    with pytest.raises(SecureAggregationError, match="not a usable"):
        keys.agree(fixed("private"), point.to_bytes(32, "little"))


def test_envelopes_are_for_one_round_cohort_sender_and_recipient(fixed):
    names = {"round_id": "a" * 32, "cohort": "b" * 64, "sender": "c" * 32, "recipient": "d" * 32}
    associated = envelope.associated_data(**names)
    one, two = b"\0" + fixed("one"), b"\0" + fixed("two")
    sealed = envelope.seal_shares(fixed("key"), fixed("nonce", 12), one, two, associated)
    assert len(sealed) == envelope.ENVELOPE_BYTES
    assert envelope.open_shares(fixed("key"), sealed, associated, "c" * 32) == (one, two)
    for name, value in names.items():
        other = envelope.associated_data(**{**names, name: "e" * len(value)})
        with pytest.raises(ShareError, match="do not decrypt") as caught:
            envelope.open_shares(fixed("key"), sealed, other, "c" * 32)
        assert caught.value.devices == ("c" * 32,)
    with pytest.raises(ShareError, match="do not decrypt"):
        envelope.open_shares(fixed("another key"), sealed, associated, "c" * 32)


@pytest.mark.parametrize("length", [0, 11, 93, 95])
def test_an_envelope_of_another_size(fixed, length):
    associated = envelope.associated_data("a" * 32, "b" * 64, "c" * 32, "d" * 32)
    with pytest.raises(ShareError, match=f"expected 94 bytes, got {length}"):
        envelope.open_shares(fixed("key"), bytes(length), associated, "c" * 32)


def test_an_envelope_with_a_share_that_is_none(fixed):
    associated = envelope.associated_data("a" * 32, "b" * 64, "c" * 32, "d" * 32)
    sealed = envelope.seal_shares(fixed("key"), fixed("nonce", 12), b"\xff" * 33, bytes(33), associated)
    with pytest.raises(ShareError, match="below 2") as caught:
        envelope.open_shares(fixed("key"), sealed, associated, "c" * 32)
    assert caught.value.devices == ("c" * 32,)
