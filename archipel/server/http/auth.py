"""Identifies callers: devices by session tokens, people and scripts by access tokens. Only token hashes are stored."""

from __future__ import annotations

import hashlib
import hmac

from sqlalchemy import bindparam, select

from archipel.server.callers import ANYONE, ROOT, Identity
from archipel.server.database.server_tables import AccessToken
from archipel.server.database.tables import Device, DeviceSession
from archipel.server.http.problems import refuse
from archipel.server.services import Services

ACCESS_PREFIX = "apt_"
"""Access tokens begin with this, so that scanners for leaked secrets recognize them."""
NOT_VALID = "the token is unknown, revoked or has expired; a device opens a new session, a person needs another token"
"""One text for devices and people, because an unknown token does not show which kind it is."""


_SESSION = (
    select(DeviceSession.device_id, DeviceSession.expires)
    .join(Device, Device.device_id == DeviceSession.device_id)
    .where(DeviceSession.token_hash == bindparam("digest"), Device.revoked.is_(None))
)
_TOKEN = select(
    AccessToken.token_id, AccessToken.role, AccessToken.populations, AccessToken.expires, AccessToken.revoked
).where(AccessToken.token_hash == bindparam("digest"))


class Authenticator:
    """Turns the header `Authorization: Bearer` into an Identity.

    A session is cached for CACHE_SECONDS. So for that long another web process may still show a revoked device its
    round and files. It stores nothing in the device's name, because those transactions check for revocation.
    """

    def __init__(self, services: Services) -> None:
        self._services = services
        self._root = bytes.fromhex(services.settings.operator_token_sha256)
        self._sessions = services.sessions

    def identify(self, authorization: str | None) -> Identity:
        """The caller's identity; `anyone` without a header. Raises ApiError 401 for an invalid token."""
        if authorization is None:
            return ANYONE
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() != "bearer" or not token:
            raise refuse(401, "expected 'Authorization: Bearer TOKEN'")
        digest = token_hash(token)
        if hmac.compare_digest(digest, self._root):
            return ROOT
        if token.startswith(ACCESS_PREFIX):
            return self._access(digest)
        return Identity("device", self._device(digest))

    def _access(self, digest: bytes) -> Identity:
        # Not cached, so that revoking an access token takes effect at once.
        row = self._services.database.look(_TOKEN, digest=digest)
        if row is None or row.revoked is not None or (row.expires or float("inf")) <= self._services.clock():
            raise refuse(401, NOT_VALID)
        return Identity(row.role, row.token_id, None if row.populations is None else frozenset(row.populations))

    def _device(self, digest: bytes) -> str:
        now = self._services.clock()
        cached = self._sessions.get(digest, now)
        if cached is not None:
            return cached
        # Looked up by its hash, so that the time it takes reveals nothing about valid tokens.
        row = self._services.database.look(_SESSION, digest=digest)
        if row is None or row.expires <= now:
            self._sessions.drop(digest)
            raise refuse(401, NOT_VALID)
        device_id: str = row.device_id
        self._sessions.keep(digest, device_id, now, row.expires)
        return device_id


def token_hash(token: str) -> bytes:
    """SHA-256 of a bearer token: 32 bytes."""
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
