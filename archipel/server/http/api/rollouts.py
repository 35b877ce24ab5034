"""Rollouts: operators begin, watch, pause and abort them. The coordinator takes them through their stages."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from sqlalchemy.orm import Session

from archipel.errors import ArchipelError, InvalidRequestError
from archipel.protocol.operator.registry import Gate, RolloutInfo, RolloutPage, RolloutQuery, RolloutRequest
from archipel.server.audit import log as audit
from archipel.server.callers import Identity
from archipel.server.database.registry_tables import Model, ModelVersion, Rollout
from archipel.server.devices.smallest_answer import check_enough, hides, reads_attributes
from archipel.server.http.idempotency import keyed
from archipel.server.http.paging import page
from archipel.server.http.problems import refuse
from archipel.server.http.routes import ANALYST, OPERATOR, READ, Call, Route
from archipel.server.registry import rollouts, stage_evaluations
from archipel.server.registry.rollout_views import describe_rollouts
from archipel.server.registry.rollout_waiting import explain
from archipel.server.registry.stage_devices import too_few
from archipel.server.registry.versions import find_model, find_version
from archipel.server.rounds import weights_log
from archipel.server.storage.blob_rows import keep_weights

SALT_BYTES = 16


def create_rollout(call: Call[RolloutRequest]) -> tuple[RolloutInfo, int]:
    """Begin to roll a version out, to more devices in each stage; once for each idempotency key."""
    key, now, request = keyed(call), call.services.clock(), call.body
    with call.services.database.write() as session:
        model = find_model(session, call.identity, request.model, lock=True, error=InvalidRequestError)
        # Before all checks: a repeated request gets its rollout, whatever has changed since.
        known = session.get(Rollout, key.id)
        if known is not None:
            key.require_same(known.request_digest)
            return _info(call, session, known), 200
        made = _checked(call, session, model, now)
        made.rollout_id, made.request_digest = key.id, key.digest
        keep_weights(session, session.get_one(ModelVersion, (model.name, made.version)).weights)
        rollouts.begin(session, made, now)
        # Going back to earlier weights needs an entry in the log, or devices would refuse them.
        if made.version < made.baseline:
            weights_log.go_back(session, call.services.settings.private_key, model.name, made.version)
        audit.append(
            session, now, call.identity.actor, "rollout.create", made.rollout_id,
            version=f"{model.name}/{made.version}", percent=made.percent,
        )  # fmt: skip
        return _info(call, session, made), 201


def foresee_rollout(call: Call[RolloutRequest]) -> list[str]:
    """Whether the first stage has too few devices for its gate, as these happen to be drawn. Raises as
    `create_rollout`; nothing is written."""
    now, request, settings = call.services.clock(), call.body, call.services.settings
    with call.services.database.read() as session:
        model = find_model(session, call.identity, request.model, error=InvalidRequestError)
        made = _checked(call, session, model, now)
        if not isinstance(request.gate, Gate):
            return []
        made.rollout_id, made.stage, made.percent = secrets.token_hex(16), 1, request.stages[0].percent
        task = stage_evaluations.make_task(session, made, request.gate, "candidate", now, settings)
        ends = now + request.stages[0].soak_seconds + request.gate.seconds
        few = too_few(session, task, by=ends, smallest=settings.smallest_answer)
    return [f"the first stage would be rolled back: {few}"] if few else []


def _checked(call: Call[RolloutRequest], session: Session, model: Model, now: float) -> Rollout:
    """What the request asks for, not stored and without a stage. Raises ApiError where it is not possible."""
    request = call.body
    promoted, version = _versions(session, model, request)
    fewest = request.gate.min_devices if isinstance(request.gate, Gate) else None
    try:
        _check_stages(request)
        smallest = call.services.settings.smallest_answer
        # Without a gate nothing depends on a number of devices, and this only checks the expression.
        check_enough(request.eligibility, smallest if fewest is None else fewest, "gate: min_devices", smallest)
        most = call.services.settings.max_update_bytes
        stage_evaluations.check_version(session, model, version.number, now)
        stage_evaluations.check_evaluations(session, request, version, promoted, model.population, most, now)
    except ArchipelError as error:
        raise refuse(422, f"the rollout is not possible: {error}") from None
    # A gate's evaluation is a query. Whoever chooses its devices by an eligibility must have the right to run one.
    if fewest is not None and reads_attributes(request.eligibility) and call.identity.role not in ANALYST:
        raise refuse(403, "a gate over devices with an eligibility is a query of them: an admin may ask it")
    return Rollout(
        model=model.name,
        population=model.population,
        version=version.number,
        baseline=promoted.number,
        eligibility=request.eligibility,
        salt=secrets.token_hex(SALT_BYTES),
        request=msgspec.json.encode(request),
        reason="",
        created_by=call.identity.actor,
        created=now,
    )


def list_rollouts(call: Call[None]) -> RolloutPage:
    """Rollouts, newest first, of a model or of all."""
    query: RolloutQuery = call.query
    chosen = [] if query.model is None else [Rollout.model == query.model]
    where = call.identity.visible(Rollout.population)
    with call.services.database.read() as session:
        rows, after = page(
            session, Rollout, Rollout.created, Rollout.rollout_id, query, *where, chosen=chosen, newest_first=True
        )
        return RolloutPage(items=_infos(call, session, rows), next=after)


def show_rollout(call: Call[None], rollout_id: str) -> RolloutInfo:
    """One rollout, with the results of each stage."""
    with call.services.database.read() as session:
        return _info(call, session, _rollout(session, call.identity, rollout_id))


def pause_rollout(call: Call[None], rollout_id: str) -> RolloutInfo:
    """Pause a rollout for at most a week; after that the server rolls it back.

    The server refuses to pause a rollout that has ended.
    """
    return _change(call, rollout_id, lambda rollout: rollout.state != "paused", rollouts.pause)


def resume_rollout(call: Call[None], rollout_id: str) -> RolloutInfo:
    """Resume a paused rollout, with the time that the stage or its evaluation had left."""
    return _change(call, rollout_id, lambda rollout: rollout.state == "paused", rollouts.resume)


def abort_rollout(call: Call[None], rollout_id: str) -> RolloutInfo:
    """Roll back: all devices are offered the promoted version again. One that has ended stays as it is."""
    now, actor = call.services.clock(), call.identity.actor
    with call.services.database.write() as session:
        rollout = _rollout(session, call.identity, rollout_id, lock=True)
        if rollout.ended is None:
            rollouts.roll_back(session, rollout, "aborted by the operator", now=now, actor=actor)
            weights_log.go_back(session, call.services.settings.private_key, rollout.model, rollout.baseline)
        return _info(call, session, rollout)


def _change(
    call: Call[None], rollout_id: str, applies: Callable[[Rollout], bool], change: Callable[..., None]
) -> RolloutInfo:
    with call.services.database.write() as session:
        rollout = _rollout(session, call.identity, rollout_id, lock=True)
        if rollout.ended is not None:
            raise refuse(409, f"the rollout is {rollout.state}")
        if applies(rollout):  # else it is in the wanted state already: a repeated request changes nothing
            change(session, rollout, now=call.services.clock(), actor=call.identity.actor)
        return _info(call, session, rollout)


def _versions(session: Session, model: Model, request: RolloutRequest) -> tuple[ModelVersion, ModelVersion]:
    """The promoted version and the one to roll out. Raises ApiError 409 if no rollout can begin now."""
    version = find_version(session, model, request.version, error=InvalidRequestError)
    if model.promoted is None:
        raise refuse(409, f"no version of model {model.name!r} is promoted, so there is none to go back to")
    if version.number == model.promoted:
        raise refuse(409, f"version {version.number} is promoted already")
    if version.rejected is not None:
        raise refuse(409, f"version {version.number} is rejected: {version.reason}; restore it first")
    live = rollouts.live_rollout(session, model.name)
    if live is not None:
        raise refuse(409, f"rollout {live.rollout_id} of version {live.version} is under way; abort it first")
    return find_version(session, model, model.promoted), version


def _check_stages(request: RolloutRequest) -> None:
    for before, after in itertools.pairwise(request.stages):
        if after.percent <= before.percent:
            raise refuse(422, f"stages: {after.percent:g} percent after {before.percent:g}; each must have more")


def _rollout(session: Session, identity: Identity, rollout_id: str, *, lock: bool = False) -> Rollout:
    rollout = session.get(Rollout, rollout_id, with_for_update=lock or None)
    if rollout is None or not identity.may(rollout.population):
        raise refuse(404, f"no rollout {rollout_id}")
    return rollout


def _infos(call: Call[Any], session: Session, rollouts: Sequence[Rollout]) -> list[RolloutInfo]:
    settings, now = call.services.settings, call.services.clock()

    def waits(rollout: Rollout) -> str:
        # As of tasks: whoever may not ask for numbers of devices by another expression is not told them by this one.
        if hides(rollout.eligibility, settings.smallest_answer) and call.identity.role not in OPERATOR:
            return ""
        return explain(session, rollout, now=now, settings=settings)

    return describe_rollouts(session, rollouts, waits)


def _info(call: Call[Any], session: Session, rollout: Rollout) -> RolloutInfo:
    return _infos(call, session, [rollout])[0]


_ROLLOUT = "/v1/rollouts/<id:rollout_id>"

ROUTES = (
    Route(
        "POST",
        "/v1/rollouts",
        OPERATOR,
        create_rollout,
        RolloutRequest,
        RolloutInfo,
        status=201,
        foresee=foresee_rollout,
    ),
    Route("GET", "/v1/rollouts", READ, list_rollouts, response=RolloutPage, query=RolloutQuery),
    Route("GET", _ROLLOUT, READ, show_rollout, response=RolloutInfo),
    Route("POST", f"{_ROLLOUT}/pause", OPERATOR, pause_rollout, response=RolloutInfo),
    Route("POST", f"{_ROLLOUT}/resume", OPERATOR, resume_rollout, response=RolloutInfo),
    Route("POST", f"{_ROLLOUT}/abort", OPERATOR, abort_rollout, response=RolloutInfo),
)
