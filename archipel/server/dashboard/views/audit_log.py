"""The audit log: who did what, newest first."""

from __future__ import annotations

from archipel.protocol.operator.access import AuditHead
from archipel.protocol.sealed import decode
from archipel.server.dashboard import rendering
from archipel.server.dashboard.desk import Desk
from archipel.server.dashboard.pages import ROOT, Page

SHOWN = 50


def show_audit(desk: Desk) -> str:
    """Entries, newest first; the query's `before` is the number of the entry that follows those shown."""
    head = decode("audit", desk.ask("audit_head").body, AuditHead)
    before = desk.query.get("before", "")
    end = min(int(before), head.seq + 1) if before.isdecimal() and len(before) < 16 else head.seq + 1
    start = max(0, end - 1 - SHOWN)
    entries = desk.ask("list_audit", query={"after": start, "limit": SHOWN}).items
    shown = [each for each in entries if each.seq < end]
    return rendering.render(
        "audit.html", desk, entries=shown[::-1], head=head, older=shown[0].seq if shown and shown[0].seq > 1 else None
    )


PAGES = (Page("GET", f"{ROOT}/audit", show_audit, ("list_audit", "audit_head")),)
