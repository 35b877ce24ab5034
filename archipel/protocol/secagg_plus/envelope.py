"""Envelopes: a dealer's two shares for one holder, under AES-256-GCM, with commitments that the server keeps.

What is in an envelope the server cannot read; what its holder must show later it can check against the commitments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from archipel.errors import MessageError, ShareError
from archipel.protocol.secagg import keys
from archipel.protocol.secagg_plus.member import Session
from archipel.protocol.secagg_plus.shares import COMMITMENT_BYTES, SHARE_BYTES, check_share, commit

NONCE_BYTES = 12
ENVELOPE_BYTES = NONCE_BYTES + 2 * SHARE_BYTES + 16
COMMITMENTS_BYTES = 2 * COMMITMENT_BYTES
DEALT_BYTES = ENVELOPE_BYTES + COMMITMENTS_BYTES
"""Of one envelope and its two commitments."""

Pair = tuple[bytes, bytes]
"""The share of a mask key, and the share of a seed."""


def bind(session: Session, root: bytes) -> bytes:
    """The bytes that everything in a session is bound to: the round, its plan and its cohort."""
    return bytes(session) + root


def seal(key: bytes, bound: bytes, dealer: int, holder: int, pair: Pair, randomness: Callable[[int], bytes]) -> bytes:
    """The envelope. `key` has 32 bytes and serves one dealer and one holder; they are named by their places."""
    nonce = randomness(NONCE_BYTES)
    return nonce + AESGCM(key).encrypt(nonce, b"".join(pair), _associated(bound, dealer, holder))


def unseal(key: bytes, bound: bytes, dealer: int, holder: int, position: int, dealt: bytes) -> Pair:
    """The two shares, of `dealt` (an envelope and its commitments) to the holder at `position` of its dealer's.

    Raises ShareError when the envelope does not open, or when the commitments are to other shares.
    """
    envelope, commitments = dealt[:ENVELOPE_BYTES], dealt[ENVELOPE_BYTES:]
    try:
        plain = AESGCM(key).decrypt(envelope[:NONCE_BYTES], envelope[NONCE_BYTES:], _associated(bound, dealer, holder))
    except InvalidTag:
        raise ShareError(f"shares from place {dealer}: they do not decrypt") from None
    pair = plain[:SHARE_BYTES], plain[SHARE_BYTES:]
    for share in pair:
        check_share(share)
    if commit_pair(bound, dealer, position, pair) != commitments:
        raise ShareError(f"shares from place {dealer}: its commitments are to other shares")
    return pair


def commit_pair(bound: bytes, dealer: int, position: int, pair: Pair) -> bytes:
    """The commitments to both shares, in the order of the pair."""
    # The kind is a part of what is bound: a share of the one cannot be shown as a share of the other.
    return b"".join(
        commit(dealer, position, share, bound + kind) for kind, share in zip((b"mask key", b"seed"), pair, strict=True)
    )


def envelope_key(private: X25519PrivateKey, peer: bytes, salt: bytes, dealer_key: bytes, holder_key: bytes) -> bytes:
    """The key of the envelope from the owner of cipher key `dealer_key` to that of `holder_key`; either derives it."""
    return keys.envelope_key(keys.agree(private, peer), salt, dealer_key, holder_key)


def divide(what: str, data: bytes, size: int, count: int) -> Sequence[bytes]:
    """`count` pieces of `size` bytes. Raises MessageError for another length."""
    return divide_runs(what, data, (size, count))[0]


def divide_runs(what: str, data: bytes, *runs: tuple[int, int]) -> list[Sequence[bytes]]:
    """The pieces of several runs one after the other, each (bytes of a piece, pieces). Raises MessageError as above."""
    check_runs(what, data, *runs)
    found: list[Sequence[bytes]] = []
    start = 0
    for size, count in runs:
        found.append([data[start + size * index : start + size * (index + 1)] for index in range(count)])
        start += size * count
    return found


def check_runs(what: str, data: bytes, *runs: tuple[int, int]) -> None:
    """Raises MessageError where the data do not have the length of these runs."""
    if len(data) != sum(size * count for size, count in runs):
        expected = " and ".join(f"{count} times {size}" for size, count in runs if size)
        raise MessageError(f"{what}: expected {expected} bytes, got {len(data)}")


def _associated(bound: bytes, dealer: int, holder: int) -> bytes:
    # Both places: the server cannot pass an envelope off as another dealer's, of whom it then asks for another secret.
    return b"archipel/v2/envelope\0" + bound + dealer.to_bytes(4, "big") + holder.to_bytes(4, "big")
