"""Models: their versions, which of them is promoted, and how to go back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from archipel.errors import InvalidRequestError
from archipel.protocol.messages import MAX_MODELS
from archipel.protocol.operator.registry import (
    ModelInfo,
    ModelPage,
    ModelRequest,
    NameQuery,
    NumberQuery,
    PromotionInfo,
    PromotionPage,
    PromotionRequest,
    RejectionRequest,
    RetentionRequest,
    VersionDetail,
    VersionInfo,
    VersionPage,
    VersionRequest,
)
from archipel.server.audit import log as audit
from archipel.server.database.registry_tables import Model, ModelVersion, Promotion
from archipel.server.http.idempotency import Keyed, keyed
from archipel.server.http.paging import page_by
from archipel.server.http.problems import refuse
from archipel.server.http.routes import OPERATOR, READ, Call, Route
from archipel.server.registry import rollouts
from archipel.server.registry import versions as registry
from archipel.server.registry.versions import find_model, find_version, subject
from archipel.server.registry.views import describe_models, describe_versions, evaluations_of
from archipel.server.rounds import weights_log
from archipel.server.rounds.noise import ledger
from archipel.server.storage.blob_rows import keep_weights


def create_model(call: Call[ModelRequest]) -> tuple[ModelInfo, int]:
    """Make a model of a population; the same again changes nothing."""
    now = call.services.clock()
    call.identity.require(call.body.population)
    with call.services.database.write() as session:
        known = session.get(Model, call.body.name)
        if known is not None:
            if known.population != call.body.population:
                # Names are unique on the server, so the caller learns that this one is taken, but not by which
                # population.
                raise refuse(409, f"the name {known.name!r} is taken by another model; choose another name")
            return _info(session, known, now), 200
        # The limit keeps the offers for a device within one answer.
        others = session.scalars(select(Model.name).where(Model.population == call.body.population)).all()
        if len(others) >= MAX_MODELS:
            raise refuse(422, f"population {call.body.population!r} has {MAX_MODELS} models, which is the limit")
        made = Model(name=call.body.name, population=call.body.population, created=now)
        session.add(made)
        session.flush()
        audit.append(session, now, call.identity.actor, "model.create", made.name, population=made.population)
        return _info(session, made, now), 201


def list_models(call: Call[None]) -> ModelPage:
    """Models, by name."""
    where = call.identity.visible(Model.population)
    with call.services.database.read() as session:
        rows, after = page_by(session, Model, Model.name, call.query.limit, call.query.after, *where)
        return ModelPage(items=describe_models(session, rows, call.services.clock()), next=after)


def show_model(call: Call[None], name: str) -> ModelInfo:
    """One model."""
    with call.services.database.read() as session:
        return _info(session, find_model(session, call.identity, name), call.services.clock())


def keep_versions(call: Call[RetentionRequest], name: str) -> ModelInfo:
    """Set which weights of the model's versions are kept; both null: those that the server's settings say."""
    now, request = call.services.clock(), call.body
    with call.services.database.write() as session:
        model = find_model(session, call.identity, name, lock=True)
        if (model.keep_versions, model.keep_days) != (request.keep_versions, request.keep_days):
            model.keep_versions, model.keep_days = request.keep_versions, request.keep_days
            session.flush()
            audit.append(
                session, now, call.identity.actor, "model.keep", name, versions=model.keep_versions,
                days=model.keep_days,
            )  # fmt: skip
        return _info(session, model, now)


def register_version(call: Call[VersionRequest], name: str) -> tuple[VersionInfo, int]:
    """Register a bundle, or what a training task made of it; the same content is the same version."""
    now = call.services.clock()
    with call.services.database.write() as session:
        model = find_model(session, call.identity, name, lock=True)
        version, new = registry.register(session, call.identity, model, call.body, now)
        return _versions(call, session, model, [version])[0], 201 if new else 200


def list_versions(call: Call[None], name: str) -> VersionPage:
    """A model's versions, newest first."""
    with call.services.database.read() as session:
        model = find_model(session, call.identity, name)
        rows, after = page_by(
            session, ModelVersion, ModelVersion.number, call.query.limit, call.query.after,
            ModelVersion.model == name, newest_first=True,
        )  # fmt: skip
        return VersionPage(items=_versions(call, session, model, rows), next=after)


def show_version(call: Call[None], name: str, number: str) -> VersionDetail:
    """One version, with the results of its evaluations by devices."""
    with call.services.database.read() as session:
        model = find_model(session, call.identity, name)
        version = find_version(session, model, int(number))
        [info] = _versions(call, session, model, [version])
        evaluations = evaluations_of(session, model, version)
        spent = ledger.spent_by_version(session, version)
    shown = {each: getattr(info, each) for each in info.__struct_fields__}
    return VersionDetail(**shown, evaluations=evaluations, privacy_spent=spent)


def promote_version(call: Call[PromotionRequest], name: str) -> ModelInfo:
    """Make a version the one for all devices; once for each idempotency key."""
    key, now = keyed(call, f"promote {name} "), call.services.clock()
    with call.services.database.write() as session:
        # The model's lock comes first: a repeated request waits here, and then finds the entry of the first one.
        model = find_model(session, call.identity, name, lock=True)
        # A request that was served changes nothing when it is repeated, whatever is promoted by then.
        if not _is_done(session, key):
            version = find_version(session, model, call.body.version, error=InvalidRequestError)
            _require_no_rollout(session, name)
            if version.rejected is not None:
                raise refuse(409, f"version {version.number} is rejected: {version.reason}; restore it first")
            if version.number != model.promoted:
                registry.require_valid(session, version, model.population, now)
                keep_weights(session, version.weights)
                # Going back to earlier weights needs an entry in the log, or devices would refuse them.
                if version.number < (model.promoted or 0):
                    weights_log.go_back(session, call.services.settings.private_key, name, version.number)
                registry.set_promoted(
                    session, model, version.number, below=model.promotion, how="promote", now=now,
                    actor=call.identity.actor, request_id=key.id, request_digest=key.digest,
                )  # fmt: skip
        return _info(session, model, now)


def roll_back_model(call: Call[None], name: str) -> ModelInfo:
    """Undo the rollout under way, or else the last promotion; once for each idempotency key."""
    key, now = keyed(call, f"rollback {name} "), call.services.clock()
    actor, request = call.identity.actor, {"request_id": key.id, "request_digest": key.digest}
    with call.services.database.write() as session:
        model = find_model(session, call.identity, name, lock=True)
        if not _is_done(session, key):
            live = rollouts.live_rollout(session, name, lock=True)
            if live is None:
                registry.take_back(session, model, now=now, actor=actor, **request)
            else:
                rollouts.roll_back(session, live, "its model was rolled back by the operator", now=now, actor=actor)
                # The baseline is promoted again by an entry with the same `below`, so that a further rollback goes back
                # further.
                below = session.get_one(Promotion, (name, model.promotion)).below
                registry.set_promoted(
                    session, model, live.baseline, below=below, how="rollback", now=now, actor=actor,
                    rollout_id=live.rollout_id, **request,
                )  # fmt: skip
            weights_log.go_back(session, call.services.settings.private_key, model.name, model.promoted)
        return _info(session, model, now)


def list_promotions(call: Call[None], name: str) -> PromotionPage:
    """The model's promotions, newest first: which version was for all devices, and since when."""
    with call.services.database.read() as session:
        find_model(session, call.identity, name)
        rows, after = page_by(
            session, Promotion, Promotion.number, call.query.limit, call.query.after,
            Promotion.model == name, newest_first=True,
        )  # fmt: skip
    items = [
        PromotionInfo(
            number=row.number,
            version=row.version,
            how=row.how,  # type: ignore[arg-type]
            rollout_id=row.rollout_id,
            actor=row.actor,
            created=row.created,
        )
        for row in rows
    ]
    return PromotionPage(items=items, next=after)


def reject_version(call: Call[RejectionRequest], name: str, number: str) -> VersionInfo:
    """Reject a version: nobody can promote it until somebody restores it.

    The server refuses to reject a version that is promoted or being rolled out.
    """
    now = call.services.clock()
    with call.services.database.write() as session:
        model = find_model(session, call.identity, name, lock=True)
        version = find_version(session, model, int(number))
        if version.number == model.promoted:
            raise refuse(409, f"version {number} is promoted; roll the model back first")
        _require_no_rollout(session, name, version=version.number)
        if version.rejected is None:
            version.rejected, version.reason = now, call.body.reason
            session.flush()
            audit.append(
                session, now, call.identity.actor, "version.reject", subject(model, version.number),
                reason=version.reason,
            )  # fmt: skip
        return _versions(call, session, model, [version])[0]


def restore_version(call: Call[None], name: str, number: str) -> VersionInfo:
    """Restore a rejected version, so that it can be promoted again."""
    now = call.services.clock()
    with call.services.database.write() as session:
        model = find_model(session, call.identity, name, lock=True)
        version = find_version(session, model, int(number))
        if version.rejected is not None:
            version.rejected, version.reason = None, ""
            session.flush()
            audit.append(session, now, call.identity.actor, "version.restore", subject(model, version.number))
        return _versions(call, session, model, [version])[0]


def _info(session: Session, model: Model, now: float) -> ModelInfo:
    return describe_models(session, [model], now)[0]


def _versions(call: Call[Any], session: Session, model: Model, versions: Sequence[ModelVersion]) -> list[VersionInfo]:
    services = call.services
    return describe_versions(session, model, versions, services.clock(), services.settings.smallest_answer)


def _is_done(session: Session, key: Keyed) -> bool:
    """Whether a request with this key was served already. Raises ApiError 409 if that was a different request."""
    known = session.scalar(select(Promotion).where(Promotion.request_id == key.id))
    if known is not None:
        key.require_same(known.request_digest)
    return known is not None


def _require_no_rollout(session: Session, name: str, *, version: int | None = None) -> None:
    """Raise ApiError 409 if a rollout of that version (None: of any) is under way."""
    live = rollouts.live_rollout(session, name, lock=True)
    if live is not None and version in (None, live.version):
        raise refuse(409, f"rollout {live.rollout_id} of version {live.version} is under way; abort it first")


_MODEL = "/v1/models/<name:name>"
_VERSION = f"{_MODEL}/versions/<number:number>"

ROUTES = (
    Route("POST", "/v1/models", OPERATOR, create_model, ModelRequest, ModelInfo, status=201),
    Route("GET", "/v1/models", READ, list_models, response=ModelPage, query=NameQuery),
    Route("GET", _MODEL, READ, show_model, response=ModelInfo),
    Route("POST", f"{_MODEL}/retention", OPERATOR, keep_versions, RetentionRequest, ModelInfo),
    Route("POST", f"{_MODEL}/versions", OPERATOR, register_version, VersionRequest, VersionInfo, status=201),
    Route("GET", f"{_MODEL}/versions", READ, list_versions, response=VersionPage, query=NumberQuery),
    Route("GET", _VERSION, READ, show_version, response=VersionDetail),
    Route("POST", f"{_VERSION}/reject", OPERATOR, reject_version, RejectionRequest, VersionInfo),
    Route("POST", f"{_VERSION}/restore", OPERATOR, restore_version, response=VersionInfo),
    Route("POST", f"{_MODEL}/promote", OPERATOR, promote_version, PromotionRequest, ModelInfo),
    Route("POST", f"{_MODEL}/rollback", OPERATOR, roll_back_model, response=ModelInfo),
    Route("GET", f"{_MODEL}/promotions", READ, list_promotions, response=PromotionPage, query=NumberQuery),
)
