"""The audit log: auditors read its entries, and keep its signed head elsewhere."""

from __future__ import annotations

from sqlalchemy import func, select

from archipel.protocol.operator.access import AuditHead, AuditPage, AuditQuery
from archipel.protocol.sealed import Sealed, seal
from archipel.server.audit.chain import FIRST
from archipel.server.audit.log import read
from archipel.server.database.server_tables import AuditRow
from archipel.server.http.routes import AUDIT, Call, Route


def list_audit(call: Call[None]) -> AuditPage:
    """Entries, oldest first; each holds the hash of the one before."""
    with call.services.database.read() as session:
        entries = read(session, call.query.after, call.query.limit + 1)
    shown = entries[: call.query.limit]
    return AuditPage(items=shown, next=shown[-1].seq if len(entries) > len(shown) else None)


def audit_head(call: Call[None]) -> Sealed:
    """Number and hash of the newest entry, signed by the server: keep it, and the log cannot be made anew unseen."""
    with call.services.database.read() as session:
        newest = select(func.max(AuditRow.seq)).scalar_subquery()
        row = session.execute(select(AuditRow.seq, AuditRow.hash).where(AuditRow.seq == newest)).one_or_none()
    head = AuditHead(seq=row.seq if row else 0, hash=row.hash if row else FIRST, time=call.services.clock())
    return seal("audit", head, call.services.settings.private_key)


ROUTES = (
    Route("GET", "/v1/audit", AUDIT, list_audit, response=AuditPage, query=AuditQuery, everywhere=True),
    Route("GET", "/v1/audit/head", AUDIT, audit_head, response=Sealed, everywhere=True),
)
