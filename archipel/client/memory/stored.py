"""Reading the agent's own small files: with a limit, and decoded strictly. archipel/durable.py writes them."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from archipel.errors import ClientError, MessageError
from archipel.protocol.sealed import decode

T = TypeVar("T")


def read_stored(path: Path, limit: int, what: str, kind: type[T], remedy: str) -> T | None:
    """The struct in the JSON file `path`; None if there is no file.

    `what` names the file in errors, and `remedy` says what the owner can do if it is damaged. Raises ClientError if it
    cannot be read, has more than `limit` bytes or is not a `kind`.
    """
    try:
        data = read_limited(path, limit)
        return None if data is None else decode(what, data, kind)
    except MessageError as error:
        raise ClientError(f"{path}: damaged ({error}); {remedy}") from None


def read_limited(path: Path, limit: int) -> bytes | None:
    """The bytes of the file; None if there is none. Raises ClientError if it cannot be read, MessageError if it has
    more than `limit` bytes."""
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
