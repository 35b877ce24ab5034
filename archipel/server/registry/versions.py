"""The model registry: versions by content, and which of them is for all devices.

Each function works in its caller's transaction. Locks are always taken in the order model, rollout, tasks, so no two
transactions can wait for each other.
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
from archipel.server.storage.blob_rows import keep_weights


def find_model(
    session: Session, identity: Identity, name: str, *, lock: bool = False, error: type[RefusalError] = NotFoundError
) -> Model:
    """The model of that name. Raises `error` if there is none, or none that the caller may see."""
    model = session.get(Model, name, with_for_update=lock or None)
    if model is None or not identity.may(model.population):
        # One error for both: that the model exists is not for this caller to know.
        raise error(f"no model {name!r}")
    return model


def find_version(
    session: Session, model: Model, number: int, *, error: type[RefusalError] = NotFoundError
) -> ModelVersion:
    """The version with that number. Raises `error` if there is none."""
    version = session.get(ModelVersion, (model.name, number))
    if version is None:
        raise error(f"model {model.name!r} has no version {number}")
    return version


def require_valid(session: Session, version: ModelVersion, population: str, now: float) -> None:
    """Raise InvalidRequestError if devices would refuse the version: its bundle is for others, or has expired."""
    try:
        check_validity(decode_manifest(session.get_one(BundleRow, version.bundle).manifest), population, now)
    except PolicyError as error:
        raise InvalidRequestError(str(error)) from None


def content_digest(bundle: str, weights: str | None) -> str:
    """SHA-256 (hex) of what a device runs: a bundle, with its own weights (None) or others."""
    # Canonical JSON: equal content must have an equal digest, by which it is found again.
    return hashlib.sha256(
        json.dumps({"bundle": bundle, "weights": weights}, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()


def register(
    session: Session, identity: Identity, model: Model, request: VersionRequest, now: float
) -> tuple[ModelVersion, bool]:
    """Register the bundle or the training's version that the request names. The caller has locked `model`.

    Returns:
        The version with that content, and whether it is new. The same content is never registered twice.

    Raises:
        InvalidRequestError: The request names neither or both, or something unknown, expired or for others.
    """
    if (request.bundle is None) == (request.task_id is None):
        raise InvalidRequestError("name either a bundle or a task_id")
    if request.bundle is not None:
        if request.task_version is not None:
            raise InvalidRequestError("task_version: belongs to a task_id")
        made = _version_of_bundle(session, identity, model, request.bundle)
    else:
        made = _version_of_task(session, identity, model, str(request.task_id), request.task_version)
    require_valid(session, made, model.population, now)
    if request.parent is not None:
        made.parent = find_version(session, model, request.parent, error=InvalidRequestError).number
    known = session.scalar(
        select(ModelVersion).where(ModelVersion.model == model.name, ModelVersion.digest == made.digest)
    )
    if known is not None:
        return known, False
    keep_weights(session, made.weights, error=InvalidRequestError)
    made.number = (newest(session, model.name) or 0) + 1  # the model's lock keeps others from taking the same number
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
    """Number of the version that was registered last; None if the model has none."""
    return session.scalar(select(func.max(ModelVersion.number)).where(ModelVersion.model == model))


def subject(model: Model, number: int) -> str:
    """The name of a version in the audit log."""
    return f"{model.name}/{number}"


def set_promoted(
    session: Session, model: Model, version: int, *, below: int | None, how: How, now: float, actor: str, **more: Any
) -> None:
    """Make `version` the one for all devices, and add it to the history of promotions.

    `below` is the entry that a later rollback returns to (None: there is none). `more` are other columns of the entry.
    """
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
    """Promote the version that was promoted before, or the last one before it that is not rejected.

    Raises ConflictError if there is none.
    """
    # The entries form a stack through `below`. The new entry points below the one it returns to, so rolling back twice
    # goes two versions back instead of returning to the version that was rolled back first.
    entry = session.get(Promotion, (model.name, model.promotion))
    while entry is not None and entry.below is not None:
        entry = session.get_one(Promotion, (model.name, entry.below))
        version = session.get_one(ModelVersion, (model.name, entry.version))
        if version.rejected is None and version.number != model.promoted:
            set_promoted(session, model, entry.version, below=entry.below, how="rollback", now=now, actor=actor, **more)
            return
    raise ConflictError(f"no version of model {model.name!r} was promoted before that could be gone back to")


def offer_anew(session: Session, population: str, now: float) -> None:
    """Raise the population's serial, so that web processes read anew what its devices are offered."""
    row = session.get(OfferSerial, population, with_for_update=True)
    # Devices accept no offer with an older serial than they have seen. Milliseconds since 1970 grow even if the
    # database was restored from a backup.
    time = int(now * 1000)
    if row is None:
        session.add(OfferSerial(population=population, serial=time))
    else:
        row.serial = max(row.serial + 1, time)


def _version_of_bundle(session: Session, identity: Identity, model: Model, digest: str) -> ModelVersion:
    row = reach.find_bundle(session, identity, digest)
    if row is None:
        raise InvalidRequestError(f"no bundle {digest}; upload it first")
    lineage = decode_manifest(row.manifest).lineage
    parent = None if lineage.parent is None else _newest_with_bundle(session, model, lineage.parent)
    return _make_version(model, digest, None, parent=parent)


def _version_of_task(
    session: Session, identity: Identity, model: Model, task_id: str, number: int | None
) -> ModelVersion:
    task = session.get(Task, task_id)
    if task is None or not identity.may(task.population):
        raise InvalidRequestError(f"no task {task_id}")
    query = select(Version).where(Version.task_id == task_id)
    if number is not None:
        query = query.where(Version.number == number)
    trained = session.scalars(query.order_by(Version.number.desc()).limit(1)).one_or_none()
    if trained is None:
        what = "versions yet" if number is None else f"version {number}"
        raise InvalidRequestError(
            f"task {request_of(task).name!r} has no {what}; tasks of kind training make them, one in each round"
        )
    # Version 0 has the bundle's own weights, so it must have the same content digest as the bundle.
    weights = None if trained.round_id is None else trained.weights
    parent = _parent_in_task(session, model, task, trained.number)
    return _make_version(model, task.bundle, weights, parent=parent, task_id=task_id, task_version=trained.number)


def _make_version(model: Model, bundle: str, weights: str | None, *, parent: int | None, **origin: Any) -> ModelVersion:
    digest = content_digest(bundle, weights)
    return ModelVersion(
        model=model.name, digest=digest, bundle=bundle, weights=weights, parent=parent, reason="", **origin
    )


def _parent_in_task(session: Session, model: Model, task: Task, number: int) -> int | None:
    """The number of the last registered version of the same training before this one; else that of its bundle."""
    if number == 0:
        return None
    earlier = (
        select(ModelVersion.number)
        .join(Version, Version.weights == ModelVersion.weights)
        .where(
            ModelVersion.model == model.name,
            # Weights alone are not a version: it is the bundle that says what is done with them.
            ModelVersion.bundle == task.bundle,
            Version.task_id == task.task_id,
            Version.number < number,
        )
        .order_by(Version.number.desc())
        .limit(1)
    )
    parent = session.scalar(earlier)
    if parent is not None:
        return parent
    began = select(ModelVersion.number).where(
        ModelVersion.model == model.name, ModelVersion.digest == content_digest(task.bundle, None)
    )
    return session.scalar(began)


def _newest_with_bundle(session: Session, model: Model, bundle: str) -> int | None:
    """Number of the newest version with that bundle; None if there is none."""
    return session.scalar(
        select(func.max(ModelVersion.number)).where(ModelVersion.model == model.name, ModelVersion.bundle == bundle)
    )
