"""Idempotency keys: a request that is sent twice creates one object, because the object's id follows from the key."""

from __future__ import annotations

import hashlib
import re
import secrets
from dataclasses import dataclass
from typing import Any

from flask import request

from archipel.protocol.operator.tasks import IDEMPOTENCY_HEADER
from archipel.server.http.problems import refuse
from archipel.server.http.routes import Call

_KEY = re.compile(r"[A-Za-z0-9_-]{16,64}")


@dataclass(frozen=True)
class Keyed:
    """`id` is the id of the object to create. It depends on the key and on the caller's token, so callers cannot take
    each other's; without a key it is random. `digest` distinguishes different requests under one key."""

    id: str
    digest: str

    def require_same(self, digest: str | None) -> None:
        """Raise ApiError 409 if the key was used for a request with another `digest`."""
        if digest != self.digest:
            raise refuse(409, f"this {IDEMPOTENCY_HEADER} was used for another request; take a new one")


def keyed(call: Call[Any], purpose: str = "") -> Keyed:
    """The key of the request being served. `purpose` separates endpoints. Raises ApiError 400 for a malformed key."""
    key = call.key if call.key is not None else request.headers.get(IDEMPOTENCY_HEADER)
    digest = hashlib.sha256(purpose.encode() + call.raw).hexdigest()
    if key is None:
        return Keyed(secrets.token_hex(16), digest)
    if not _KEY.fullmatch(key):
        raise refuse(400, f"header {IDEMPOTENCY_HEADER}: expected 16 to 64 letters, digits, '-' or '_'")
    return Keyed(hashlib.sha256(f"{call.identity.actor}\0{key}".encode()).hexdigest()[:32], digest)
