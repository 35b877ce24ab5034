"""People's sessions: who is logged in at the dashboard, for how long, and with which rights.

A session is opened for an Identity. The dashboard's own login takes it from an access token; a provider of identities
can open one with an identity of its own making (`Opening.by_provider`). Only the hash of a session's cookie is stored.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Collection
from dataclasses import dataclass

import msgspec
from sqlalchemy import Connection, Row, bindparam, delete, func, insert, select, update

from archipel.server.audit import log as audit
from archipel.server.callers import ROOT, Identity
from archipel.server.database.server_tables import AccessToken, PersonSession
from archipel.server.services import Services

SEEN_SECONDS = 60.0
"""A session's last use is written down no more often than this, so that reading pages hardly writes."""
MOST_SESSIONS = 50
"""Sessions of one person at the same time; the oldest end when there are more."""
_COOKIE = 43
"""Characters of 32 random bytes in base64."""


@dataclass(frozen=True)
class Opening:
    """What a session is opened with: the identity, and what it depends on."""

    identity: Identity
    source: str
    token_id: str | None = None

    @classmethod
    def by_token(cls, identity: Identity) -> Opening:
        """With an access token, or the root token: the session ends with it."""
        if identity.id == ROOT.id:
            return cls(identity, "root")
        return cls(identity, "token", identity.id)

    @classmethod
    def by_provider(cls, identity: Identity) -> Opening:
        """With what a provider of identities says; `identity.id` has at most 48 characters and is always the same for
        the same person. The session ends by its times, and with the settings of the provider."""
        return cls(identity, "provider")


@dataclass(frozen=True)
class PersonalSession:
    """A session that is under way. `csrf` is what forms of its pages must carry."""

    identity: Identity
    csrf: str
    digest: bytes
    expires: float


_FIND = (
    select(
        PersonSession.source, PersonSession.credential, PersonSession.subject, PersonSession.role,
        PersonSession.populations, PersonSession.csrf, PersonSession.seen, PersonSession.expires,
        AccessToken.token_id.label("found_token"), AccessToken.revoked, AccessToken.expires.label("token_expires"),
    )
    .outerjoin(AccessToken, AccessToken.token_id == PersonSession.token_id)
    .where(PersonSession.session_hash == bindparam("digest"))
)  # fmt: skip
_FIND_ALL = (
    select(
        PersonSession.session_hash, PersonSession.source, PersonSession.credential, PersonSession.seen,
        PersonSession.expires, AccessToken.token_id.label("found_token"), AccessToken.revoked,
        AccessToken.expires.label("token_expires"),
    )
    .outerjoin(AccessToken, AccessToken.token_id == PersonSession.token_id)
    .where(PersonSession.session_hash.in_(bindparam("digests", expanding=True)))
)  # fmt: skip
_SEEN = update(PersonSession).where(PersonSession.session_hash == bindparam("of")).values(seen=bindparam("now"))
_CLOSE = delete(PersonSession).where(PersonSession.session_hash == bindparam("of"))


class SessionStore:
    """The sessions of one database; any number of web processes share them."""

    def __init__(self, services: Services) -> None:
        self._services = services

    def open(self, opening: Opening, *, instead_of: str | None = None) -> str:
        """Open a session and return its cookie, which is new and random: nobody else can have chosen it.

        The session of the cookie `instead_of`, which the browser had before, ends.
        """
        now, settings, identity = self._services.clock(), self._services.settings, opening.identity
        cookie = secrets.token_urlsafe(32)
        with self._services.database.write() as session:
            if instead_of is not None:
                session.execute(_CLOSE, {"of": _digest(instead_of)})
            session.execute(delete(PersonSession).where(PersonSession.expires <= now))
            own = PersonSession.subject == identity.id, PersonSession.source == opening.source
            oldest = (
                select(PersonSession.session_hash).where(*own).order_by(PersonSession.opened.desc())
                .offset(MOST_SESSIONS - 1)
            )  # fmt: skip
            for digest in session.scalars(oldest).all():
                session.execute(_CLOSE, {"of": digest})
            session.execute(
                insert(PersonSession).values(
                    session_hash=_digest(cookie), source=opening.source, token_id=opening.token_id,
                    credential=self._credential(opening.source), subject=identity.id,
                    role=identity.role, csrf=secrets.token_urlsafe(32), opened=now, seen=now,
                    populations=None if identity.populations is None else sorted(identity.populations),
                    expires=now + settings.person_seconds,
                )
            )  # fmt: skip
            audit.append(session, now, identity.actor, "dashboard.login", opening.source)
        return cookie

    def find(self, cookie: str | None) -> PersonalSession | None:
        """The session of a cookie; None if there is none, or if it has ended."""
        if cookie is None or len(cookie) != _COOKIE:
            return None
        digest = _digest(cookie)
        # Looked up in every request, so that a token that is revoked now is out now. By its hash, so that the time it
        # takes tells nothing about cookies that there are.
        row = self._services.database.look(_FIND, digest=digest)
        now = self._services.clock()
        if row is None or not self._goes_on(row, now):
            return None
        if now - row.seen > SEEN_SECONDS:
            self._services.database.together(lambda connection: _note(connection, digest, now))
        rights = None if row.populations is None else frozenset(row.populations)
        return PersonalSession(Identity(row.role, row.subject, rights), row.csrf, digest, row.expires)

    def alive(self, digests: Collection[bytes]) -> set[bytes]:
        """Which of the sessions with these digests go on, without noting that they are used."""
        now = self._services.clock()
        rows = self._services.database.look_all(_FIND_ALL, digests=list(digests))
        return {row.session_hash for row in rows if self._goes_on(row, now)}

    def close(self, session: PersonalSession) -> None:
        """End a session now."""
        with self._services.database.write() as writing:
            writing.execute(_CLOSE, {"of": session.digest})
            audit.append(writing, self._services.clock(), session.identity.actor, "dashboard.logout", "")

    def count(self) -> int:
        """How many sessions are stored, those that have ended and were not swept yet included."""
        with self._services.database.read() as session:
            return session.scalar(select(func.count()).select_from(PersonSession)) or 0

    def _goes_on(self, row: Row[tuple[object, ...]], now: float) -> bool:
        if row.expires <= now or row.seen + self._services.settings.person_idle_seconds <= now:
            return False
        if row.source == "token":
            alive = row.found_token is not None and row.revoked is None
            return alive and (row.token_expires or float("inf")) > now
        held = self._credential(row.source)
        return held is not None and hmac.compare_digest(row.credential or b"", held)

    def _credential(self, source: str) -> bytes | None:
        """What a session of the root token, or of a provider, holds of the settings that it came from: nothing that
        they follow from. It ends with them. None: there are no such settings."""
        settings = self._services.settings
        if source == "root":
            return hashlib.sha256(b"root session" + bytes.fromhex(settings.operator_token_sha256)).digest()
        if source == "provider" and settings.openid is not None:
            return hashlib.sha256(b"provider session" + msgspec.json.encode(settings.openid)).digest()
        return None


def _note(connection: Connection, digest: bytes, now: float) -> None:
    connection.execute(_SEEN, {"of": digest, "now": now})


def _digest(cookie: str) -> bytes:
    return hashlib.sha256(cookie.encode("utf-8", "surrogateescape")).digest()
