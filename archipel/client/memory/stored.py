"""The agent's own small files: read with a limit, decoded strictly. archipel.durable writes them."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from archipel.errors import ClientError, MessageError
from archipel.protocol.sealed import decode

T = TypeVar("T")


def read_stored(path: Path, limit: int, what: str, kind: type[T], remedy: str) -> T | None:
    """What is in the JSON file `path`; None where there is none.

    `what` names it in errors, `remedy` says what its owner can do about a damaged one. Raises ClientError where it
    cannot be read, has more than `limit` bytes or is not a `kind`.
    """
    try:
        data = read_limited(path, limit)
        return None if data is None else decode(what, data, kind)
    except MessageError as error:
        raise ClientError(f"{path}: damaged ({error}); {remedy}") from None


def read_limited(path: Path, limit: int) -> bytes | None:
    """The bytes of the file; None where there is none. Raises ClientError where it cannot be read, MessageError beyond
    `limit` bytes."""
    try:
        with open(path, "rb") as file:
            data = file.read(limit + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ClientError(f"{path}: cannot be read ({error.strerror})") from None
    if len(data) > limit:
        raise MessageError(f"more than {limit} bytes")
    return data
