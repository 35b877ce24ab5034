"""Signed statements: bytes, an Ed25519 signature over a label and those bytes, and nothing else.

The body travels as the bytes that were signed, so there is nothing to canonicalize and nothing to confuse: a
signature for one purpose (label) is worthless for another.
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
"""For what is sent on to every peer: blanks in JSON would be a way to make a message for all of them too large."""

T = TypeVar("T")
_ENCODER = msgspec.json.Encoder(order="sorted")
_DECODERS: dict[Any, msgspec.json.Decoder[Any]] = {}
_MAKING = threading.Lock()


class Sealed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`body` is the JSON of one struct; `signature` is Ed25519 over `archipel/v1/LABEL`, a zero byte and the body."""

    body: bytes
    signature: bytes


def public_bytes(key: Ed25519PrivateKey | Ed25519PublicKey) -> bytes:
    """The raw 32 bytes of the public key."""
    public = key.public_key() if isinstance(key, Ed25519PrivateKey) else key
    return public.public_bytes_raw()


def seal(label: str, statement: msgspec.Struct, key: Ed25519PrivateKey) -> Sealed:
    body = _ENCODER.encode(statement)
    return Sealed(body=body, signature=key.sign(signed_bytes(label, body)))


def unseal(label: str, sealed: Sealed, public_key: bytes, kind: type[T], *, limit: int = MAX_BODY_BYTES) -> T:
    """Verify with the raw 32-byte `public_key`, then decode strictly. `limit` is that of the body in bytes.

    Raises CertificateError when the signature does not verify, MessageError when the body is not a `kind`.
    """
    if len(sealed.body) > limit:
        raise MessageError(f"{label}: body of {len(sealed.body)} bytes, the limit is {limit}")
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(sealed.signature, signed_bytes(label, sealed.body))
    except (InvalidSignature, ValueError):
        raise CertificateError(f"{label}: the signature does not verify with key {public_key.hex()[:16]}...") from None
    return decode(label, sealed.body, kind)


def decode(label: str, data: bytes, kind: type[T]) -> T:
    """Strict JSON decoding. Raises MessageError that names `label` and the place in the message."""
    try:
        found: T = _decoder(kind).decode(data)
        return found
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MessageError(f"{label}: {error}") from None


def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    made = _DECODERS.get(kind)
    if made is None:
        # What msgspec knows about a struct it finds out once, and crashes when two threads do so at the same time.
        with _MAKING:
            made = _DECODERS.setdefault(kind, msgspec.json.Decoder(kind))
    return made


def encode(message: msgspec.Struct) -> bytes:
    """JSON with sorted keys."""
    return _ENCODER.encode(message)


def signed_bytes(label: str, body: bytes) -> bytes:
    """What a signature is over."""
    return b"archipel/v1/" + label.encode() + b"\0" + body
