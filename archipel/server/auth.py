"""Who is asking: a device by its session token, the operator by theirs. Only hashes of tokens are kept."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from typing import Literal

from sqlalchemy import bindparam, select

from archipel.server.models import DeviceSession
from archipel.server.problems import refuse
from archipel.server.services import Services

Role = Literal["anyone", "device", "operator"]

CACHE_SECONDS = 5.0
CACHE_ENTRIES = 20_000


@dataclass(frozen=True)
class Identity:
    """`device_id` is empty unless the role is `device`."""

    role: Role
    device_id: str = ""


ANYONE = Identity("anyone")
OPERATOR = Identity("operator")


_SESSION = select(DeviceSession.device_id, DeviceSession.expires).where(DeviceSession.token_hash == bindparam("digest"))


class Authenticator:
    """From `Authorization: Bearer` to an Identity. A session is believed for 5 s without asking the database again."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._operator = bytes.fromhex(services.settings.operator_token_sha256)
        self._sessions: dict[bytes, tuple[str, float]] = {}

    def identify(self, authorization: str | None) -> Identity:
        """Raises ApiError (401) for a token that is not valid; no header at all is `anyone`."""
        if authorization is None:
            return ANYONE
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() != "bearer" or not token:
            raise refuse(401, "expected 'Authorization: Bearer TOKEN'")
        digest = token_hash(token)
        if hmac.compare_digest(digest, self._operator):
            return OPERATOR
        return Identity("device", self._device(digest))

    def _device(self, digest: bytes) -> str:
        now = self._services.clock()
        cached = self._sessions.get(digest)
        if cached is not None and now < cached[1]:
            return cached[0]
        # By the hash, so that the time of the look-up says nothing about a token.
        row = self._services.database.look(_SESSION, digest=digest)
        if row is None or row.expires <= now:
            self._sessions.pop(digest, None)
            raise refuse(401, "the token is unknown or has expired; open a new session")
        if len(self._sessions) >= CACHE_ENTRIES:
            self._sessions.clear()
        device_id: str = row.device_id
        self._sessions[digest] = (device_id, min(row.expires, now + CACHE_SECONDS))
        return device_id


def token_hash(token: str) -> bytes:
    """SHA-256 of a bearer token: 32 bytes."""
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
