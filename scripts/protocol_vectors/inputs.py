"""Inputs that only depend on their names, for the scripts that make test vectors."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from archipel.protocol import encode

Json = dict[str, Any]


def fixed(name: str, count: int = 32) -> bytes:
    """`count` bytes that only depend on `name`: SHAKE-256 of it."""
    return hashlib.shake_256(b"archipel vectors: " + name.encode()).digest(count)


def signing_key(name: str) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(fixed(name))


def plain(message: msgspec.Struct) -> Any:
    return json.loads(encode(message))


class Stream:
    """Serves `name`'s bytes in order and remembers how many were drawn."""

    def __init__(self, name: str) -> None:
        self.name, self.drawn = name, 0

    def __call__(self, count: int) -> bytes:
        self.drawn += count
        return fixed(self.name, self.drawn)[-count:]


def flip(data: bytes) -> bytes:
    """The last bit inverted."""
    return data[:-1] + bytes([data[-1] ^ 1])
