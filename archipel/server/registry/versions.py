"""The model registry: versions by content, and which of them is for all devices. Each function is within a transaction.

Locks are taken in one order: the model, its rollout, tasks.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from archipel.bundle import decode_manifest
from archipel.errors import ConflictError, InvalidRequestError, NotFoundError, PolicyError, RefusalError
from archipel.protocol.operator.registry import How, VersionRequest
from archipel.protocol.policy import check_validity
from archipel.server.audit import log as audit
from archipel.server.callers import Identity
from archipel.server.database.registry_tables import Model, ModelVersion, OfferSerial, Promotion
from archipel.server.database.tables import BundleRow, Task, Version
from archipel.server.database.task_requests import request_of
from archipel.server.rounds import reach


def find_model(
    session: Session, identity: Identity, name: str, *, lock: bool = False, error: type[RefusalError] = NotFoundError
) -> Model:
    """Raises `error` where there is none for the caller."""
    model = session.get(Model, name, with_for_update=lock or None)
    if model is None or not identity.may(model.population):
        raise error(f"no model {name!r}")
    return model


def find_version(
    session: Session, model: Model, number: int, *, error: type[RefusalError] = NotFoundError
) -> ModelVersion:
    """Raises `error` where there is none."""
    version = session.get(ModelVersion, (model.name, number))
    if version is None:
        raise error(f"model {model.name!r} has no version {number}")
    return version


def require_valid(session: Session, version: ModelVersion, population: str, now: float) -> None:
    """Raises InvalidRequestError where the version's bundle is not for the population, or has expired."""
    try:
        check_validity(decode_manifest(session.get_one(BundleRow, version.bundle).manifest), population, now)
    except PolicyError as error:  # devices would refuse it
        raise InvalidRequestError(str(error)) from None


def content_digest(bundle: str, weights: str | None) -> str:
    """SHA-256 (hex) of what a device would run."""
    return hashlib.sha256(
        json.dumps({"bundle": bundle, "weights": weights}, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()


def register(
    session: Session, identity: Identity, model: Model, request: VersionRequest, now: float
) -> tuple[ModelVersion, bool]:
    """The version with the content that is asked for, and whether it is new. `model` is locked.

    Raises InvalidRequestError.
    """
    if (request.bundle is None) == (request.task_id is None):
        raise InvalidRequestError("name either a bundle or a task_id")
    if request.bundle is not None:
        if request.task_version is not None:
            raise InvalidRequestError("task_version: belongs to a task_id")
        made = _of_bundle(session, identity, model, request.bundle)
    else:
        made = _of_task(session, identity, model, str(request.task_id), request.task_version)
    require_valid(session, made, model.population, now)
    if request.parent is not None:
        made.parent = find_version(session, model, request.parent, error=InvalidRequestError).number
    known = session.scalar(
        select(ModelVersion).where(ModelVersion.model == model.name, ModelVersion.digest == made.digest)
    )
    if known is not None:
        return known, False
    made.number = (newest(session, model.name) or 0) + 1
    made.created = now
    session.add(made)
    session.flush()
    reach.extend(session, model.population, reach.OF_MODEL, made.bundle, made.weights)
    audit.append(
        session, now, identity.actor, "version.register", subject(model, made.number), digest=made.digest,
        task=made.task_id, task_version=made.task_version,
    )  # fmt: skip
    return made, True


def newest(session: Session, model: str) -> int | None:
    """Number of the version that was registered last."""
    return session.scalar(select(func.max(ModelVersion.number)).where(ModelVersion.model == model))


def subject(model: Model, number: int) -> str:
    """As the audit log names a version."""
    return f"{model.name}/{number}"


def set_promoted(
    session: Session, model: Model, version: int, *, below: int | None, how: How, now: float, actor: str, **more: Any
) -> None:
    """From now on `version` is for all devices; `below` and `more` are columns of the entry in the history."""
    last = session.scalar(select(func.max(Promotion.number)).where(Promotion.model == model.name)) or 0
    entry = Promotion(
        model=model.name, number=last + 1, version=version, below=below, how=how, actor=actor, created=now, **more
    )
    session.add(entry)
    before = model.promoted
    model.promoted, model.promotion = version, entry.number
    offer_anew(session, model.population, now)
    session.flush()
    audit.append(session, now, actor, f"model.{how}", subject(model, version), before=before)


def take_back(session: Session, model: Model, *, now: float, actor: str, **more: Any) -> None:
    """Promote the version that was promoted before, or the last one before it not rejected. Raises ConflictError."""
    entry = session.get(Promotion, (model.name, model.promotion))
    while entry is not None and entry.below is not None:
        entry = session.get_one(Promotion, (model.name, entry.below))
        there = session.get_one(ModelVersion, (model.name, entry.version))
        if there.rejected is None and there.number != model.promoted:
            set_promoted(session, model, entry.version, below=entry.below, how="rollback", now=now, actor=actor, **more)
            return
    raise ConflictError(f"no version of model {model.name!r} was promoted before that could be gone back to")


def offer_anew(session: Session, population: str, now: float) -> None:
    """What the population's devices are offered changes with this transaction."""
    row = session.get(OfferSerial, population, with_for_update=True)
    # Milliseconds since 1970: devices take no older offer than they had, also of a database that was put back from a
    # backup.
    time = int(now * 1000)
    if row is None:
        session.add(OfferSerial(population=population, serial=time))
    else:
        row.serial = max(row.serial + 1, time)


def _of_bundle(session: Session, identity: Identity, model: Model, digest: str) -> ModelVersion:
    row = reach.find_bundle(session, identity, digest)
    if row is None:
        raise InvalidRequestError(f"no bundle {digest}; upload it first")
    lineage = decode_manifest(row.manifest).lineage
    parent = None if lineage.parent is None else _number_of(session, model, lineage.parent)
    return _version(model, digest, None, parent=parent)


def _of_task(session: Session, identity: Identity, model: Model, task_id: str, number: int | None) -> ModelVersion:
    task = session.get(Task, task_id)
    if task is None or not identity.may(task.population):
        raise InvalidRequestError(f"no task {task_id}")
    wanted = select(Version).where(Version.task_id == task_id)
    if number is not None:
        wanted = wanted.where(Version.number == number)
    found = session.scalars(wanted.order_by(Version.number.desc()).limit(1)).one_or_none()
    if found is None:
        what = "versions yet" if number is None else f"version {number}"
        raise InvalidRequestError(
            f"task {request_of(task).name!r} has no {what}; tasks of kind training make them, one in each round"
        )
    # Version 0 holds what the bundle holds.
    weights = None if found.round_id is None else found.weights
    parent = _parent_in_task(session, model, task, found.number)
    return _version(model, task.bundle, weights, parent=parent, task_id=task_id, task_version=found.number)


def _version(model: Model, bundle: str, weights: str | None, *, parent: int | None, **origin: Any) -> ModelVersion:
    digest = content_digest(bundle, weights)
    return ModelVersion(
        model=model.name, digest=digest, bundle=bundle, weights=weights, parent=parent, reason="", **origin
    )


def _parent_in_task(session: Session, model: Model, task: Task, number: int) -> int | None:
    """The last version before, of the same training, that is registered; else the bundle that it began with."""
    if number == 0:
        return None
    earlier = (
        select(ModelVersion.number)
        .join(Version, Version.weights == ModelVersion.weights)
        .where(
            ModelVersion.model == model.name,
            ModelVersion.bundle == task.bundle,
            Version.task_id == task.task_id,
            Version.number < number,
        )
        .order_by(Version.number.desc())
        .limit(1)
    )
    found = session.scalar(earlier)
    if found is not None:
        return found
    began = select(ModelVersion.number).where(
        ModelVersion.model == model.name, ModelVersion.digest == content_digest(task.bundle, None)
    )
    return session.scalar(began)


def _number_of(session: Session, model: Model, bundle: str) -> int | None:
    """The newest version with that bundle."""
    return session.scalar(
        select(func.max(ModelVersion.number)).where(ModelVersion.model == model.name, ModelVersion.bundle == bundle)
    )
