"""The audit log: who did what to what, each entry holding the hash of the one before.

An entry is appended in the transaction of what it tells, so neither is there without the other. The database refuses to
change or delete entries; whoever gets around that breaks the chain, unless they make it anew to its end, and that shows
in a head that was kept elsewhere (`archipel audit verify --head`).
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import insert, select, text
from sqlalchemy.orm import Session

from archipel.protocol.operator.tasks import AuditEntry
from archipel.server.audit.chain import FIRST, entry_hash
from archipel.server.database.tables import AuditRow

_LOCK = 0x61726368


def take_turn(session: Session) -> None:
    """Wait until no other transaction that appends is open. `append` does it by itself; whoever looks first at what
    must not change until then does it before that."""
    if session.get_bind().dialect.name == "postgresql":
        # One after the other, or two entries would follow the same one; freed when the transaction ends.
        session.execute(text(f"SELECT pg_advisory_xact_lock({_LOCK})"))


def append(session: Session, now: float, actor: str, action: str, subject: str, **detail: Any) -> None:
    """Add an entry to the open writing transaction. `detail` never holds tokens, keys or data of devices."""
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
