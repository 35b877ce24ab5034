"""The audit log: who did what to what, each entry holding the hash of the one before.

An entry is appended in the transaction of what it tells, so neither is there without the other. The database refuses to
change or delete entries; whoever gets around that breaks the chain, unless they make it anew to its end, and that shows
in a head that was kept elsewhere (`archipel audit verify --head`).

    hash = SHA-256 of the entry's other fields as JSON: keys sorted, no blanks, UTF-8
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any

import msgspec
from sqlalchemy import insert, select, text
from sqlalchemy.orm import Session

from archipel.errors import AuditError
from archipel.server.models import AuditRow
from archipel.server.resources import AuditEntry

FIRST = "0" * 64
"""What the first entry has for the hash of the one before."""
_LOCK = 0x61726368


def append(session: Session, now: float, actor: str, action: str, subject: str, **detail: Any) -> None:
    """Add an entry to the open writing transaction. `detail` never holds tokens, keys or data of devices."""
    if session.get_bind().dialect.name == "postgresql":
        # One after the other, or two entries would follow the same one; freed when the transaction ends.
        session.execute(text(f"SELECT pg_advisory_xact_lock({_LOCK})"))
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


def entry_hash(fields: dict[str, Any]) -> str:
    """Of all fields but `hash`."""
    plain = {name: value for name, value in fields.items() if name != "hash"}
    return hashlib.sha256(
        json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
    ).hexdigest()


def verify(entries: Iterable[AuditEntry], *, heads: Iterable[tuple[int, str]] = ()) -> tuple[int, str]:
    """Check a whole log, oldest first, and that it still holds the `heads` (number and hash) that were kept elsewhere.

    Returns the log's own head. Raises AuditError that names the first entry that is wrong.
    """
    kept = dict(heads)
    seq, previous = 0, FIRST
    for entry in entries:
        if entry.seq != seq + 1:
            raise AuditError(f"audit log: entry {seq + 1} is missing; after {seq} comes {entry.seq}")
        if entry.previous != previous:
            raise AuditError(f"audit log: entry {entry.seq} does not follow entry {seq}")
        if entry_hash(msgspec.to_builtins(entry)) != entry.hash:
            raise AuditError(f"audit log: entry {entry.seq} ({entry.action} {entry.subject}) was changed")
        seq, previous = entry.seq, entry.hash
        if kept.pop(seq, previous) != previous:
            raise AuditError(f"audit log: entry {seq} is not the one that was kept: the log was made anew")
    if kept:
        raise AuditError(f"audit log: it ends at entry {seq}, but entry {max(kept)} was there when the head was kept")
    return seq, previous


def read(session: Session, after: int, limit: int) -> list[AuditEntry]:
    """Entries after number `after`, oldest first."""
    rows = session.scalars(select(AuditRow).where(AuditRow.seq > after).order_by(AuditRow.seq).limit(limit))
    return [AuditEntry(**{name: getattr(row, name) for name in AuditEntry.__struct_fields__}) for row in rows]
