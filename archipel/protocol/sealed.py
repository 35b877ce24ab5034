"""Signed statements: bytes, and an Ed25519 signature over a label and those bytes.

The body is sent as the very bytes that were signed, so nobody has to encode it again to verify it. The label names the
statement's purpose, so a signature for one purpose does not verify for another.
"""

from __future__ import annotations

import threading
from typing import Any, TypeVar

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from archipel.errors import CertificateError, MessageError

MAX_BODY_BYTES = 1 << 20
MAX_STATEMENT_BYTES = 1024
"""For statements that the server sends on to every peer: one device could fill its own with blanks, which JSON allows,
until the message to all of them is too large."""

T = TypeVar("T")
# Sorted keys: equal messages have equal bytes, so that digests and signatures of two parties can be compared.
_ENCODER = msgspec.json.Encoder(order="sorted")
_DECODERS: dict[Any, msgspec.json.Decoder[Any]] = {}
_MAKING = threading.Lock()


class Sealed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`body` is the JSON of one struct; `signature` is Ed25519 over `archipel/v1/LABEL`, a zero byte and the body.

    Example: see `archipel.operator.AuditHead`.
    """

    body: bytes
    signature: bytes


def public_bytes(key: Ed25519PrivateKey | Ed25519PublicKey) -> bytes:
    """The raw 32 bytes of the public key."""
    public = key.public_key() if isinstance(key, Ed25519PrivateKey) else key
    return public.public_bytes_raw()


def seal(label: str, statement: msgspec.Struct, key: Ed25519PrivateKey) -> Sealed:
    """The statement as JSON, signed with `key` for the purpose `label`.

    Example:
        sealed = seal("enrol", EnrolmentProof(server_key=server_key), key)
        proof = unseal("enrol", sealed, public_bytes(key), EnrolmentProof)
    """
    body = _ENCODER.encode(statement)
    return Sealed(body=body, signature=key.sign(signed_bytes(label, body)))


def unseal(label: str, sealed: Sealed, public_key: bytes, kind: type[T], *, limit: int = MAX_BODY_BYTES) -> T:
    """The statement in `sealed`, verified and then decoded strictly.

    Arguments:
        label: the statement's purpose, which the signature must be for.
        public_key: the signer's raw 32-byte Ed25519 key.
        kind: the struct that the body must be.
        limit: the largest body, in bytes.

    Raises:
        CertificateError: the signature does not verify.
        MessageError: the body is too large or not a `kind`.
    """
    # Cheapest first: a body from outside is neither hashed before its size is known nor parsed before its signature is.
    if len(sealed.body) > limit:
        raise MessageError(f"{label}: body of {len(sealed.body)} bytes, the limit is {limit}")
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(sealed.signature, signed_bytes(label, sealed.body))
    except (InvalidSignature, ValueError):
        raise CertificateError(f"{label}: the signature does not verify with key {public_key.hex()[:16]}...") from None
    return decode(label, sealed.body, kind)


def decode(label: str, data: bytes, kind: type[T]) -> T:
    """The `kind` in `data`, decoded strictly. Raises MessageError, which names `label` and the place in the message."""
    try:
        message: T = _decoder(kind).decode(data)
        return message
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MessageError(f"{label}: {error}") from None


def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    decoder = _DECODERS.get(kind)
    if decoder is None:
        # msgspec inspects a struct when its first decoder is made, and crashes when two threads do so at the same time.
        with _MAKING:
            decoder = _DECODERS.setdefault(kind, msgspec.json.Decoder(kind))
    return decoder


def encode(message: msgspec.Struct) -> bytes:
    """The message as JSON with sorted keys and no blanks."""
    return _ENCODER.encode(message)


def signed_bytes(label: str, body: bytes) -> bytes:
    """The bytes that a signature is over."""
    # No label contains the zero byte, so that no two pairs give the same bytes.
    return b"archipel/v1/" + label.encode() + b"\0" + body
