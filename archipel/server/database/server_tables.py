"""The tables that are the server's own: the audit log, access tokens, people's sessions, the coordinator's lease."""

from __future__ import annotations

from typing import Any

from sqlalchemy import JSON, BigInteger, Float, LargeBinary, String
from sqlalchemy.orm import Mapped, mapped_column

from archipel.server.database.tables import Base, Digest, Id

COORDINATOR = "coordinator"
"""The lease of coordinators."""


class AuditRow(Base):
    """One entry of the audit log; see archipel.server.audit.log. The database refuses UPDATE and DELETE."""

    __tablename__ = "audit"
    # Counted by the log itself: a sequence of the database may leave gaps, which would look like removed entries.
    seq: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    time: Mapped[int] = mapped_column(BigInteger)
    actor: Mapped[str] = mapped_column(String(64))
    action: Mapped[str] = mapped_column(String(64))
    subject: Mapped[str] = mapped_column(String(192))
    detail: Mapped[dict[str, Any]] = mapped_column(JSON)
    previous: Mapped[str] = mapped_column(Digest)
    hash: Mapped[str] = mapped_column(Digest)


class AccessToken(Base):
    """An access token, as its SHA-256, valid until `expires` or `revoked` if these are set.

    `populations`: those for which it is valid; null: all.
    """

    __tablename__ = "access_tokens"
    token_id: Mapped[str] = mapped_column(Id, primary_key=True)
    token_hash: Mapped[bytes] = mapped_column(LargeBinary(32), unique=True)
    name: Mapped[str] = mapped_column(String(128))
    role: Mapped[str] = mapped_column(String(16))
    populations: Mapped[list[str] | None] = mapped_column(JSON(none_as_null=True))
    created: Mapped[float] = mapped_column(Float)
    expires: Mapped[float | None] = mapped_column(Float)
    revoked: Mapped[float | None] = mapped_column(Float)


class PersonSession(Base):
    """A person's session in the dashboard, as the SHA-256 of its cookie; see server.dashboard.session_store.

    `source` says what it was opened with: an access token (`token_id`), the root token ("root"; `credential` is the
    SHA-256 of its hash), or what a provider of identities says. Identity and rights are `subject`, `role` and
    `populations` (null: all). It ends at `expires`, and when nothing was asked for too long since `seen`.
    """

    __tablename__ = "person_sessions"
    session_hash: Mapped[bytes] = mapped_column(LargeBinary(32), primary_key=True)
    source: Mapped[str] = mapped_column(String(16))
    token_id: Mapped[str | None] = mapped_column(Id, index=True)
    credential: Mapped[bytes | None] = mapped_column(LargeBinary(32))
    subject: Mapped[str] = mapped_column(String(48))
    role: Mapped[str] = mapped_column(String(16))
    populations: Mapped[list[str] | None] = mapped_column(JSON(none_as_null=True))
    csrf: Mapped[str] = mapped_column(String(64))
    opened: Mapped[float] = mapped_column(Float)
    seen: Mapped[float] = mapped_column(Float)
    expires: Mapped[float] = mapped_column(Float, index=True)


class LeaseRow(Base):
    """The coordinator's lease: its holder, its number (`term`), and when it `expires`; see server.processes.lease."""

    __tablename__ = "leases"
    name: Mapped[str] = mapped_column(String(32), primary_key=True)
    holder: Mapped[str] = mapped_column(Id)
    term: Mapped[int] = mapped_column(BigInteger)
    expires: Mapped[float] = mapped_column(Float)
