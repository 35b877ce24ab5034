"""Whom a bundle or a file of weights is there for: only populations that have a reason to read it.

A row of `reaches` says why: it was uploaded for the population, a task of it is about it, or a version of its models.
People read what reaches one of their populations. A device reads what a live task or a model of its population names;
what is uploaded and not used yet is none of its business, and what a task left behind is none any more soon after it
ended: a device that was told of it a moment before fetches it in vain, but does not take that for a fault.
Whether something is not there or not theirs is the same answer to everybody, found by the same statement.
"""

from __future__ import annotations

from typing import Literal

from sqlalchemy import ColumnElement, Select, bindparam, exists, literal_column, or_, select, true
from sqlalchemy.orm import Session

from archipel.server.callers import Identity
from archipel.server.database.tables import LIVE, Blob, BundleRow, Device, Reach, Task

READABLE = ("weights", "broadcast", "revocations")
"""The kinds of blobs that are read by their digest; bundles have a digest of their own, states are the server's."""
AFTER_SECONDS = 60.0
"""For so long a device may fetch what a task names that has ended."""
OF_UPLOAD: Literal["upload"] = "upload"
OF_MODEL: Literal["model"] = "model"


def extend(session: Session, population: str, reason: str, *digests: str | None) -> None:
    """Let what has these digests (None: nothing) reach the population, because of an upload, a model or a task's id."""
    for digest in digests:
        if digest is not None:
            session.merge(Reach(digest=digest, population=population, reason=reason))


def is_bound(session: Session, digest: str, population: str) -> bool:
    """Whether a bundle was uploaded for the population."""
    return session.get(Reach, (digest, population, OF_UPLOAD)) is not None


def find_bundle(session: Session, identity: Identity, digest: str) -> BundleRow | None:
    """The bundle with that digest, where it reaches somebody who is asked by people (not by a device)."""
    return session.scalar(select(BundleRow).where(BundleRow.digest == digest, _reaches(identity, digest)))


def find_weights(session: Session, identity: Identity, digest: str) -> str | None:
    """The digest itself, where there are such weights and they reach the caller."""
    return session.scalar(
        select(Blob.digest).where(Blob.digest == digest, Blob.kind == "weights", _reaches(identity, digest))
    )


def file_of_bundle(session: Session, identity: Identity, digest: str, now: float) -> str | None:
    """The blob that is the .bundle file; None where there is none, or none for the caller."""
    return _first(session, select(BundleRow.file_digest).where(BundleRow.digest == digest), identity, digest, now)


def file_of_blob(session: Session, identity: Identity, digest: str, now: float) -> str | None:
    """The digest itself; None where there is no such blob, or none for the caller."""
    query = select(Blob.digest).where(Blob.digest == digest, Blob.kind.in_(READABLE))
    return _first(session, query, identity, digest, now)


def _first(session: Session, query: Select[str], identity: Identity, digest: str, now: float) -> str | None:
    if identity.role == "device":
        values = {"reach_device": identity.device_id, "reach_digest": digest, "reach_since": now - AFTER_SECONDS}
        return session.scalar(query.where(exists(OF_DEVICE)).limit(1), values)
    return session.scalar(query.where(_reaches(identity, digest)).limit(1))


def _reaches(identity: Identity, digest: str) -> ColumnElement[bool]:
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
            Task.ended > bindparam("reach_since"),
            Task.state.in_([literal_column(f"'{state}'") for state in LIVE]),
        ),
    )
)
