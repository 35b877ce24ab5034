"""Deletes blobs that nothing needs, in two steps, so that a kill between any two leaves nothing that is half done.

First one transaction says of each blob that it is deleted, when and why, and writes the audit log: from then on
downloads answer 410, and nobody can promote such a version or begin a task with it. The file is removed a day later
(GRACE_SECONDS), so downloads that have begun end well, and never while a backup is being made: its copy of the database
may be from before. Until a second transaction has recorded that the file is gone, it is removed again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from sqlalchemy import select, tuple_
from sqlalchemy.orm import Session

from archipel.server.audit import log as audit
from archipel.server.database.tables import Blob
from archipel.server.retention.rules import Rule, Unneeded, find_unneeded
from archipel.server.services import Services
from archipel.server.storage.holds import is_held

Write = Callable[[], AbstractContextManager[Session]]

GRACE_SECONDS = 86400.0
"""How long after its deletion a blob's file is still there."""
BATCH = 50
"""The most blobs that one transaction deletes, and files that one step removes."""


def delete_unneeded(services: Services, write: Write, rule: Rule, *, actor: str) -> list[Unneeded]:
    """Say of up to BATCH blobs that nothing needs that they are deleted, and return them."""
    now = services.clock()
    with services.database.read() as session:
        found = find_unneeded(session, rule, now, limit=BATCH)
    if not found:
        return []
    wanted = {(each.digest, each.kind) for each in found}
    with write() as session:
        # A row that another transaction holds is just being named, or deleted by somebody else: it is left for later.
        rows = session.scalars(
            select(Blob)
            .where(tuple_(Blob.digest, Blob.kind).in_(sorted(wanted)), Blob.deleted.is_(None))
            .order_by(Blob.digest, Blob.kind)
            .with_for_update(skip_locked=True)
        ).all()
        # Decided again under the locks: what was named since the first look is seen now, and nothing can be named
        # before this transaction has ended.
        locked = {(row.digest, row.kind): row for row in rows}
        gone = find_unneeded(session, rule, now, among=locked) if locked else []
        for each in gone:
            row = locked[each.digest, each.kind]
            row.deleted, row.why = now, f"by the retention rule, {rule}"
        session.flush()
        for each in gone:
            audit.append(
                session, now, actor, "blob.delete", each.digest, kind=each.kind, bytes=each.size, rule=str(rule)
            )
    return gone


def remove_deleted(services: Services, write: Write) -> int:
    """Remove the files of up to BATCH blobs that were deleted a day ago, and return how many. None during a backup."""
    now = services.clock()
    due = Blob.deleted <= now - GRACE_SECONDS
    with services.database.read() as session:
        query = select(Blob.digest).where(Blob.deleted.is_not(None), Blob.removed.is_(None), due)
        digests = session.scalars(query.distinct().limit(BATCH)).all()
    if not digests or is_held(services.storage):
        return 0
    return sum(_remove(services, write, digest, now) for digest in digests)


def _remove(services: Services, write: Write, digest: str, now: float) -> bool:
    with write() as session:
        # With all rows of these bytes locked, nobody can name the file again before it is gone.
        rows: Sequence[Blob] = session.scalars(
            select(Blob).where(Blob.digest == digest).order_by(Blob.kind).with_for_update()
        ).all()
        deleted = [row for row in rows if row.deleted is not None]
        late = [row for row in deleted if row.deleted is not None and row.deleted <= now - GRACE_SECONDS]
        if len(late) < len(deleted) or not late:
            return False  # the same bytes of another kind were deleted later, and their day is not over
        if len(deleted) == len(rows):
            services.blobs.remove(digest)
        for row in late:
            row.removed = now
    return True
