"""Who may read a bundle or a blob: only populations that have a reason to.

A row of `reaches` gives the reason: it was uploaded for the population, or one of the population's tasks or a version
of one of its models names it. People read whatever reaches one of their populations. A device reads what a live task or
a model of its population names. It cannot read uploads that are not used yet, nor, from AFTER_SECONDS after a task has
ended, what only that task named; a device that fetches such a file in vain does not take that for a fault. Whether
something does not exist or is not the caller's, the answer is the same, from the same statement.
"""

from __future__ import annotations

from typing import Literal, TypeVar

from sqlalchemy import ColumnElement, Select, bindparam, exists, literal_column, or_, select, true
from sqlalchemy.orm import InstrumentedAttribute, Session

from archipel.server.callers import Identity
from archipel.server.database.tables import LIVE, Blob, BundleRow, Device, Reach, Task

T = TypeVar("T")

READABLE = ("weights", "broadcast", "revocations")
"""The kinds of blobs that are read by their digest. Bundles have digests of their own; states are for the server."""
AFTER_SECONDS = 60.0
"""How long after a task has ended a device may still fetch what the task names."""
OF_UPLOAD: Literal["upload"] = "upload"
OF_MODEL: Literal["model"] = "model"


def extend(session: Session, population: str, reason: str, *digests: str | None) -> None:
    """Let the population read these digests (None is skipped). `reason`: OF_UPLOAD, OF_MODEL or a task's id."""
    for digest in digests:
        if digest is not None:
            session.merge(Reach(digest=digest, population=population, reason=reason))


def is_bound(session: Session, digest: str, population: str) -> bool:
    """Whether a bundle was uploaded for the population."""
    return session.get(Reach, (digest, population, OF_UPLOAD)) is not None


def find_bundle(session: Session, identity: Identity, digest: str) -> BundleRow | None:
    """The bundle with that digest if the caller (no device) may read it; else None."""
    return session.scalar(select(BundleRow).where(BundleRow.digest == digest, _reaches(identity, digest)))


def find_weights(session: Session, identity: Identity, digest: str) -> str | None:
    """The digest itself if there are such weights and the caller (no device) may read them; else None."""
    return session.scalar(
        select(Blob.digest).where(Blob.digest == digest, Blob.kind == "weights", _reaches(identity, digest))
    )


def file_of_bundle(session: Session, identity: Identity, digest: str, now: float) -> str | None:
    """Digest of the blob that is the .bundle file; None where there is none, or the caller may not read it."""
    return _find_readable(
        session, select(BundleRow.file_digest).where(BundleRow.digest == digest), identity, digest, now
    )


def find_blob(session: Session, identity: Identity, digest: str, now: float) -> Blob | None:
    """The blob, deleted or not; None where there is no such blob, or the caller may not read it."""
    query = select(Blob).where(Blob.digest == digest, Blob.kind.in_(READABLE))
    # Equal bytes of two kinds are there as long as one of them is.
    return _find_readable(session, query.order_by(Blob.deleted.is_not(None)), identity, digest, now)


def _find_readable(session: Session, query: Select[T], identity: Identity, digest: str, now: float) -> T | None:
    if identity.role == "device":
        values = {"reach_device": identity.device_id, "reach_digest": digest, "reach_since": now - AFTER_SECONDS}
        return session.scalar(query.where(exists(OF_DEVICE)).limit(1), values)
    return session.scalar(query.where(_reaches(identity, digest)).limit(1))


def visible_bundles(identity: Identity) -> ColumnElement[bool]:
    """The condition that the caller (no device) may read the bundle of a row."""
    return _reaches(identity, BundleRow.digest)


def _reaches(identity: Identity, digest: str | InstrumentedAttribute[str]) -> ColumnElement[bool]:
    if identity.populations is None:
        return true()
    return exists(select(Reach.reason).where(Reach.digest == digest, Reach.population.in_(identity.populations)))


OF_DEVICE = (
    select(Reach.reason)
    .select_from(Device)
    .join(Reach, Reach.population == Device.population)
    .outerjoin(Task, Task.task_id == Reach.reason)
    .where(
        Device.device_id == bindparam("reach_device"),
        Reach.digest == bindparam("reach_digest"),
        or_(
            Reach.reason == OF_MODEL,
            # Without a task (the reason is an upload) both comparisons are with null, so neither holds.
            Task.ended > bindparam("reach_since"),
            # Literals, because SQLAlchemy expands a list of bound parameters anew at each call.
            Task.state.in_([literal_column(f"'{state}'") for state in LIVE]),
        ),
    )
)
