"""Keys of one secure round: X25519 agreements, and HKDF-SHA256 with a label for every use.

Nothing in this package compares secrets, so it needs no comparison in constant time: AES-GCM checks the tags itself.
"""

from __future__ import annotations

import re

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from archipel.errors import MessageError, SecureAggregationError

KEY_BYTES = 32
_SMALL_ORDER = frozenset(
    number.to_bytes(KEY_BYTES, "little")
    for number in (
        0,
        1,
        325606250916557431795983626356110631294008115727848805560023387167927233504,
        39382357235489614581723060781553021112529911719440698176882885853963445705823,
        *(2**255 - 19 + offset for offset in (-1, 0, 1)),
    )
)
"""Every encoding of a point of order 1, 2, 4 or 8 on the curve and its twist, with the highest bit cleared."""


def public_key(private: bytes) -> bytes:
    """The raw X25519 public key of a raw 32-byte private key."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def is_small_order(public: bytes) -> bool:
    """Whether every private key agrees with this public key on zero (RFC 7748, section 6.1)."""
    # X25519 ignores the highest bit of a public key (RFC 7748, section 5).
    return public[:-1] + bytes([public[-1] & 127]) in _SMALL_ORDER


def private_key(private: bytes) -> X25519PrivateKey:
    """The key of 32 raw bytes. Making it takes as long as an agreement, so for many agreements make it once."""
    return X25519PrivateKey.from_private_bytes(private)


def agree(private: bytes | X25519PrivateKey, peer: bytes) -> bytes:
    """The X25519 shared secret [32 bytes] (RFC 7748, section 6.1).

    Raises SecureAggregationError for a public key of small order, with which every private key agrees on zero.
    """
    own = private_key(private) if isinstance(private, bytes) else private
    try:
        return own.exchange(X25519PublicKey.from_public_bytes(peer))
    except ValueError:
        raise SecureAggregationError(f"round key {peer.hex()[:16]}... is not a usable X25519 public key") from None


def round_salt(round_id: str, plan_digest: str) -> bytes:
    """HKDF's salt, by which keys of one round and plan are unusable in another."""
    # Fixed lengths, so that no two pairs give the same salt.
    if not re.fullmatch("[0-9a-f]{32}", round_id) or not re.fullmatch("[0-9a-f]{64}", plan_digest):
        raise MessageError("a round id has 32 hexadecimal digits, a plan's digest 64")
    return b"archipel/v1/secagg\0" + bytes.fromhex(round_id) + bytes.fromhex(plan_digest)


def envelope_private_key(secret: bytes, salt: bytes, place: int) -> bytes:
    """The clamped X25519 private key for the envelope from the member at `place` of the sorted cohort, from 0."""
    return clamp(_derive(secret, salt, b"envelope-private", place.to_bytes(4, "big")))


def clamp(private: bytes) -> bytes:
    """The canonical form of an X25519 private key: X25519 fixes five of its bits (RFC 7748, section 5)."""
    return bytes([private[0] & 248]) + private[1:-1] + bytes([private[-1] & 127 | 64])


def envelope_key(shared: bytes, salt: bytes, sender: bytes, recipient: bytes) -> bytes:
    """AES-256-GCM key of the envelope from the owner of cipher key `sender` to that of envelope key `recipient`."""
    return _derive(shared, salt, b"envelope", sender, recipient)


def pairwise_mask_key(shared: bytes, salt: bytes, one: bytes, other: bytes) -> bytes:
    """AES-256-CTR key of the mask between the owners of mask keys `one` and `other`, in either order."""
    # Sorted: both owners derive the same key, whichever of the two is their own.
    return _derive(shared, salt, b"pairwise-mask", *sorted((one, other)))


def self_mask_key(seed: bytes, salt: bytes, mask_key: bytes) -> bytes:
    """AES-256-CTR key of the self mask of the owner of `mask_key`, from its 32-byte seed."""
    return _derive(seed, salt, b"self-mask", mask_key)


def _derive(secret: bytes, salt: bytes, label: bytes, *public: bytes) -> bytes:
    info = b"archipel/v1/" + label + b"\0" + b"".join(public)
    return HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=salt, info=info).derive(secret)
