"""Sends what is larger than the kernel keeps for a reader, no slower than a bound."""

from __future__ import annotations

import socket
from collections.abc import Iterator

from flask import request

PART_BYTES = 256 << 10
"""A reader must take so much within the server's `stall_seconds`, or it is cut off."""


def parts_of(data: bytes) -> Iterator[bytes]:
    """The bytes, PART_BYTES at a time."""
    return (data[start : start + PART_BYTES] for start in range(0, len(data), PART_BYTES))


def in_time(parts: Iterator[bytes], seconds: float) -> Iterator[bytes]:
    """The body of the answer to the current request, of which the reader must take each part within `seconds`.

    gunicorn sends a part with `sendall`, for which the socket's timeout is that of the whole part: a reader who takes a
    byte now and then does not begin it anew. gunicorn sets its own again before the next request.
    """
    return _sent(parts, request.environ.get("gunicorn.socket"), seconds)


def _sent(parts: Iterator[bytes], connection: socket.socket | None, seconds: float) -> Iterator[bytes]:
    if connection is not None:
        connection.settimeout(seconds)
    yield from parts
