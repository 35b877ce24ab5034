"""The audit log: who did what to what, in entries that contain the hash of the entry before.

An entry is appended in the transaction of the change that it describes, so neither exists without the other. The
database refuses to change or delete entries. Whoever gets around that breaks the chain, or must rewrite it to its end,
which a head that was kept elsewhere reveals (`archipel audit verify --head`).
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import insert, select, text
from sqlalchemy.orm import Session

from archipel.protocol.operator.access import AuditEntry
from archipel.server.audit.chain import FIRST, entry_hash
from archipel.server.database.server_tables import AuditRow

_LOCK = 0x61726368


def take_turn(session: Session) -> None:
    """Wait until no other transaction that appends is open.

    `append` does so itself. A caller that first reads something which must not change before it appends calls this
    before it reads.
    """
    # On SQLite the only write lock has the same effect.
    if session.get_bind().dialect.name == "postgresql":
        # Without it two entries could follow the same one. The end of the transaction releases the lock.
        session.execute(text(f"SELECT pg_advisory_xact_lock({_LOCK})"))


def append(session: Session, now: float, actor: str, action: str, subject: str, **detail: Any) -> None:
    """Append an entry in the open writing transaction. `detail` must not contain tokens, keys or devices' data."""
    take_turn(session)
    last = session.execute(select(AuditRow.seq, AuditRow.hash).order_by(AuditRow.seq.desc()).limit(1)).one_or_none()
    fields: dict[str, Any] = {
        "seq": last.seq + 1 if last else 1,
        "time": round(now * 1e6),
        "actor": actor,
        "action": action,
        "subject": subject,
        "detail": detail,
        "previous": last.hash if last else FIRST,
    }
    session.execute(insert(AuditRow), [{**fields, "hash": entry_hash(fields)}])


def read(session: Session, after: int, limit: int) -> list[AuditEntry]:
    """Entries after number `after`, oldest first."""
    rows = session.scalars(select(AuditRow).where(AuditRow.seq > after).order_by(AuditRow.seq).limit(limit))
    return [AuditEntry(**{name: getattr(row, name) for name in AuditEntry.__struct_fields__}) for row in rows]
