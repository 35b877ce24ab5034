"""Keys of one secure round: X25519 agreements, and HKDF-SHA256 with a label for every use.

No secret is compared anywhere in this room: tags are checked by AES-GCM, public keys are public.
"""

from __future__ import annotations

import re

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from archipel.errors import MessageError, SecureAggregationError

KEY_BYTES = 32


def public_key(private: bytes) -> bytes:
    """The raw X25519 public key of a raw 32-byte private key."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def agree(private: bytes, peer: bytes) -> bytes:
    """The X25519 shared secret [32 bytes] (RFC 7748, section 6.1).

    Raises SecureAggregationError for a public key of small order, with which every private key agrees on zero.
    """
    try:
        return X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(peer))
    except ValueError:
        raise SecureAggregationError(f"round key {peer.hex()[:16]}... is not a usable X25519 public key") from None


def round_salt(round_id: str, plan_digest: str) -> bytes:
    """HKDF's salt: keys of one round and plan are worthless in another."""
    if not re.fullmatch("[0-9a-f]{32}", round_id) or not re.fullmatch("[0-9a-f]{64}", plan_digest):
        raise MessageError("a round id has 32 hexadecimal digits, a plan's digest 64")
    return b"archipel/v1/secagg\0" + bytes.fromhex(round_id) + bytes.fromhex(plan_digest)


def envelope_key(shared: bytes, salt: bytes, one: bytes, other: bytes) -> bytes:
    """AES-256-GCM key for the shares between the owners of cipher keys `one` and `other`, either way round."""
    return _derive(shared, salt, b"envelope", *sorted((one, other)))


def pairwise_mask_key(shared: bytes, salt: bytes, one: bytes, other: bytes) -> bytes:
    """AES-256-CTR key of the mask between the owners of mask keys `one` and `other`, either way round."""
    return _derive(shared, salt, b"pairwise-mask", *sorted((one, other)))


def self_mask_key(seed: bytes, salt: bytes, mask_key: bytes) -> bytes:
    """AES-256-CTR key of the self mask of the owner of `mask_key`, from its 32-byte seed."""
    return _derive(seed, salt, b"self-mask", mask_key)


def _derive(secret: bytes, salt: bytes, label: bytes, *public: bytes) -> bytes:
    info = b"archipel/v1/" + label + b"\0" + b"".join(public)
    return HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=salt, info=info).derive(secret)
