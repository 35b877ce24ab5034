"""The rows of blobs: named by the transaction that needs them, and given up by retention (archipel.server.retention).

Whoever writes a row that names a blob locks the blob's rows first, and so does retention before it deletes: so each
sees what the other has done. On SQLite the one write lock does the same.
"""

from __future__ import annotations

from collections.abc import Iterable

from sqlalchemy import select
from sqlalchemy.orm import Session

from archipel.errors import ConflictError, RefusalError
from archipel.protocol.moments import moment
from archipel.server.database.tables import Blob
from archipel.server.storage.blobs import BlobStore


def record_blob(session: Session, blobs: BlobStore, *, digest: str, kind: str, size: int, now: float) -> None:
    """Name a blob that was just stored, of `size` bytes. It counts again if retention had deleted the same bytes.

    Raises FileNotFoundError, an OSError, if retention has removed the file since it was stored: store it again.
    """
    rows = session.scalars(
        # A blob of another kind with these bytes has the same file.
        select(Blob).where(Blob.digest == digest).order_by(Blob.kind).with_for_update(),
        execution_options={"populate_existing": True},
    ).all()
    # Retention removes files of deleted rows under the same lock, so what is there now stays.
    if any(row.deleted is not None for row in rows) and not blobs.has(digest):
        raise FileNotFoundError(f"blob {digest}: was removed while it was stored")
    known = next((row for row in rows if row.kind == kind), None)
    if known is None:
        session.add(Blob(digest=digest, kind=kind, size=size, created=now))
    else:
        known.created, known.deleted, known.removed, known.why = now, None, None, ""
    session.flush()


def keep_weights(session: Session, digest: str | None, *, error: type[RefusalError] = ConflictError) -> None:
    """Keep weights (None: a bundle's own) from being deleted before this transaction, which names them, has ended.

    Raises `error` if they were deleted already.
    """
    if digest is None:
        return
    query = select(Blob.deleted, Blob.why).where(Blob.digest == digest, Blob.kind == "weights")
    row = session.execute(query.with_for_update(read=True)).one_or_none()
    if row is not None and row.deleted is not None:
        raise error(describe_deleted(digest, row.deleted, row.why))


def deleted_weights(session: Session, digests: Iterable[str | None]) -> dict[str, tuple[float, str]]:
    """Of these weights (None is skipped) those that were deleted: when (Unix seconds), and why."""
    wanted = {digest for digest in digests if digest is not None}
    query = select(Blob.digest, Blob.deleted, Blob.why).where(
        Blob.digest.in_(wanted), Blob.kind == "weights", Blob.deleted.is_not(None)
    )
    return {row.digest: (row.deleted, row.why) for row in session.execute(query)} if wanted else {}


def describe_deleted(digest: str, deleted: float, why: str) -> str:
    """What to say of weights that were deleted at `deleted` (Unix seconds)."""
    return f"weights {digest} were deleted {moment(deleted)}: {why}; a backup from before that has them"
