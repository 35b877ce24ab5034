"""Tasks: what the operator asks for, and how it goes."""

from __future__ import annotations

import secrets
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from archipel.bundle import decode_manifest
from archipel.errors import ArchipelError, InvalidRequestError, ServerError
from archipel.protocol.operator.tasks import (
    TaskInfo,
    TaskPage,
    TaskQuery,
    TaskRequest,
)
from archipel.protocol.policy import check_validity
from archipel.server.audit import log as audit
from archipel.server.callers import Identity
from archipel.server.database.tables import Device, Round, Task
from archipel.server.database.task_requests import audited, request_of
from archipel.server.devices.root_devices import check_root_device
from archipel.server.devices.smallest_answer import check_enough
from archipel.server.devices.spoiler_search import describe
from archipel.server.http.idempotency import keyed
from archipel.server.http.paging import page
from archipel.server.http.problems import refuse
from archipel.server.http.routes import ANALYST, OPERATOR, READ, Call, Route
from archipel.server.registry import rollouts
from archipel.server.rounds import reach
from archipel.server.rounds.assigning import let_go
from archipel.server.rounds.candidates import fewest
from archipel.server.rounds.checks import check_first_plan, check_task
from archipel.server.rounds.evaluating import cancel_evaluations, check_evaluations
from archipel.server.rounds.noise import ledger
from archipel.server.rounds.noise.hints import hints_of
from archipel.server.rounds.opening import add_task, new_task
from archipel.server.rounds.refusals import refusals_of_task
from archipel.server.rounds.waiting import last_failure, shown_waiting, under_way
from archipel.server.rounds.weights_log import is_logged
from archipel.server.storage.blob_rows import deleted_weights, keep_weights


def create_task(call: Call[TaskRequest]) -> TaskInfo | tuple[TaskInfo, int]:
    """Start training a bundle over a population, or put a question to it; once for each idempotency key."""
    services = call.services
    key, now = keyed(call), services.clock()
    checked = _settle(call, now)
    proposed = checked.kind != "training" and services.settings.query_approval
    task = new_task(
        checked,
        task_id=key.id,
        request_digest=key.digest,
        now=now,
        created_by=call.identity.actor,
        proposed=proposed,
    )
    with services.database.write() as session:
        # The id is made of the idempotency key, so a repeated request finds its task.
        known = session.get(Task, key.id, with_for_update=True)
        if known is not None:
            key.require_same(known.request_digest)
            return _info(call, session, known), 200
        keep_weights(session, task.weights, error=InvalidRequestError)
        add_task(session, task)
        audit.append(session, now, call.identity.actor, "task.create", task.task_id, **audited(task))
        return _info(call, session, task)


def foresee_task(call: Call[TaskRequest]) -> list[str]:
    """What its settings make likely to go wrong. Raises as `create_task`; nothing is written."""
    now = call.services.clock()
    checked = _settle(call, now)
    needed = fewest(new_task(checked, task_id=secrets.token_hex(16), request_digest=None, now=now))
    living = select(func.count()).where(Device.population == checked.population, Device.revoked.is_(None))
    with call.services.database.read() as session:
        enrolled = session.scalar(living) or 0
        hints = hints_of(session, checked)
    if enrolled < needed:
        hints.insert(
            0,
            f"a round begins with {needed} devices, and the population {checked.population} has {enrolled}: it waits "
            "until more have enrolled",
        )
    return hints


def _settle(call: Call[TaskRequest], now: float) -> TaskRequest:
    """The request with all that the server chooses filled in. Raises ApiError where the task is not possible."""
    services = call.services
    call.identity.require(call.body.population)
    _require_right(call.identity, call.body.kind)
    if call.body.evaluate_every is not None:
        # Its evaluations are questions to devices, as those of an analyst.
        _require_right(call.identity, "evaluation")
    with services.database.read() as session:
        bundle = reach.find_bundle(session, call.identity, call.body.bundle)
        weights = call.body.weights
        # Devices take only weights that the log of their bundle has.
        if weights is not None and not is_logged(session, call.body.population, call.body.bundle, weights):
            raise refuse(
                422,
                f"no weights {weights} in the log of this bundle and population; name those of a version that a "
                "training of this bundle made, or none for the bundle's own",
            )
        _check_devices_of(session, call.body)
        _check_root(session, call.body, now)
    if bundle is None:
        raise refuse(422, f"no bundle {call.body.bundle}; upload it first")
    # Outside of the writing transaction, which on SQLite keeps all other writers waiting.
    smallest = services.settings.smallest_answer
    try:
        check_enough(call.body.eligibility, call.body.min_cohort, "min_cohort", smallest)
        manifest = decode_manifest(bundle.manifest)
        if services.settings.upstream is not None and manifest.privacy.aggregators and call.body.kind == "training":
            # Devices refuse such a training: the root alone keeps the log of the bundle's weights.
            raise ServerError(
                f"bundle {manifest.name!r} is trained by the upstream server's tasks only (its policy has a part "
                "aggregators); create the task there"
            )
        check_validity(manifest, call.body.population, now)
        checked = check_task(
            call.body,
            manifest,
            max_update_bytes=services.settings.max_update_bytes,
            robust_bytes=services.settings.robust_bytes,
        )
        check_evaluations(checked, manifest, max_update_bytes=services.settings.max_update_bytes)
        with services.database.read() as session:
            checked = ledger.settle_noise(session, checked, manifest)
        check_first_plan(checked, manifest)
    except ArchipelError as error:
        raise refuse(422, f"the task is not possible: {error}") from None
    return checked


def _require_right(identity: Identity, kind: str) -> None:
    """Training is for operators, asking devices questions for analysts. Raises ApiError 403."""
    needed = OPERATOR if kind == "training" else ANALYST
    if identity.role not in needed:
        raise refuse(403, f"a task of kind {kind} needs the role {' or '.join(sorted(needed, reverse=True))}")


def approve_task(call: Call[None], task_id: str) -> TaskInfo:
    """Let a proposed evaluation or analysis run; whoever asked for it cannot."""
    with call.services.database.write() as session:
        task = find_task(session, call.identity, task_id, lock=True)
        if task.state != "proposed":
            raise refuse(409, f"the task is {task.state}, not proposed")
        if call.identity.actor == task.created_by:
            raise refuse(403, "whoever asked for a query cannot approve of it; somebody else must")
        if rollouts.pauses(session, task_id):
            raise refuse(409, "its rollout is paused; the query can be approved when that is resumed")
        task.state, task.approved_by = "running", call.identity.actor
        session.flush()
        audit.append(session, call.services.clock(), call.identity.actor, "task.approve", task_id)
        return _info(call, session, task)


def _check_devices_of(session: Session, request: TaskRequest) -> None:
    if request.devices_of is None:
        return
    earlier = session.get(Round, request.devices_of)
    of = None if earlier is None else session.get_one(Task, earlier.task_id)
    # One answer for both, so that nobody learns of another population's rounds.
    if earlier is None or of is None or of.population != request.population:
        raise refuse(422, f"devices_of: no round {request.devices_of} in population {request.population!r}")
    if earlier.phase != "committed":
        raise refuse(422, f"devices_of: round {request.devices_of} is {earlier.phase}, not committed")


def _check_root(session: Session, request: TaskRequest, now: float) -> None:
    try:
        check_root_device(session, request, now=now)
    except ArchipelError as error:
        raise refuse(422, f"the task is not possible: {error}") from None


def list_tasks(call: Call[None]) -> TaskPage:
    """Tasks, newest first, of those that are asked for."""
    query: TaskQuery = call.query
    chosen = [column == value for column, value in (
        (Task.population, query.population), (Task.state, query.state), (Task.kind, query.kind),
    ) if value is not None]  # fmt: skip
    if query.since is not None:
        chosen.append(Task.created >= query.since)
    with call.services.database.read() as session:
        where = call.identity.visible(Task.population)
        tasks, after = page(session, Task, Task.created, Task.task_id, query, *where, chosen=chosen, newest_first=True)
        return TaskPage(items=[_info(call, session, task) for task in tasks], next=after)


def show_task(call: Call[None], task_id: str) -> TaskInfo:
    """One task."""
    with call.services.database.read() as session:
        return _info(call, session, find_task(session, call.identity, task_id))


def cancel_task(call: Call[None], task_id: str) -> TaskInfo:
    """Stop a running task and its evaluation; live rounds fail closed. A task that has ended stays as it is."""
    with call.services.database.write() as session:
        task = find_task(session, call.identity, task_id, lock=True)
        if call.identity.role not in OPERATOR:
            _require_right(call.identity, task.kind)
        if task.live or task.state == "proposed":
            task.state = "cancelled"
            task.reason = f"cancelled by the {call.identity.role if call.identity.role == 'analyst' else 'operator'}"
            task.ended = call.services.clock()
            session.flush()
            audit.append(session, task.ended, call.identity.actor, "task.cancel", task_id)
            # The devices of a buffered task keep their seats when a round ends, so nothing else would release them.
            let_go(session, task)
            cancel_evaluations(session, task, now=task.ended, actor=call.identity.actor)
        return _info(call, session, task)


def pause_task(call: Call[None], task_id: str) -> TaskInfo:
    """Open no further rounds; the one under way is finished. A task that has ended is refused."""
    return _switch(call, task_id, "paused", "task.pause")


def resume_task(call: Call[None], task_id: str) -> TaskInfo:
    """Open rounds again."""
    return _switch(call, task_id, "running", "task.resume")


def _switch(call: Call[None], task_id: str, state: str, action: str) -> TaskInfo:
    with call.services.database.write() as session:
        task = find_task(session, call.identity, task_id, lock=True)
        # An operator may stop any task from asking devices, and may start again only what an operator may start.
        if state == "running" or call.identity.role not in OPERATOR:
            _require_right(call.identity, task.kind)
        if not task.live:
            raise refuse(409, f"the task is {task.state}")
        if task.state != state:
            task.state = state
            session.flush()
            audit.append(session, call.services.clock(), call.identity.actor, action, task_id)
        return _info(call, session, task)


def find_task(session: Session, identity: Identity, task_id: str, *, lock: bool = False) -> Task:
    """Raises ApiError 404 where there is none for the caller."""
    task = session.get(Task, task_id, with_for_update=lock or None)
    if task is None or not identity.may(task.population):
        raise refuse(404, f"no task {task_id}")
    return task


def _info(call: Call[Any], session: Session, task: Task) -> TaskInfo:
    settings, now = call.services.settings, call.services.clock()
    window, smallest = settings.check_in_window, settings.smallest_answer
    operates = call.identity.role in OPERATOR
    waiting, reasons = shown_waiting(session, task, operates=operates, now=now, window=window, smallest=smallest)
    request = request_of(task)
    return TaskInfo(
        task_id=task.task_id,
        name=request.name,
        population=task.population,
        bundle=task.bundle,
        state=task.state,  # type: ignore[arg-type]
        reason=task.reason,
        rounds=request.rounds,
        rounds_committed=task.rounds_committed,
        failed_rounds=task.failed_rounds,
        spoiled_rounds=task.spoiled_rounds,
        privacy=request.privacy,
        kind=request.kind,
        mode=request.mode,
        min_cohort=request.min_cohort,
        cohort=task.cohort,
        threshold=request.threshold or 1,
        min_contributors=request.min_contributors,
        goal=request.goal,
        concurrency=task.concurrency,
        max_staleness=request.max_staleness,
        staleness_exponent=request.staleness_exponent,
        program=request.program,
        weights=request.weights,
        metrics=request.metrics,
        distributions=request.distributions,
        max_examples=request.max_examples,
        count_adoption=request.count_adoption,
        evaluate_every=request.evaluate_every,
        evaluation_noise=request.evaluation_noise,
        evaluates=task.evaluates,
        eligibility=task.eligibility,
        percent=task.percent,
        max_contributions=request.max_contributions,
        rest_seconds=request.rest_seconds,
        devices_of=request.devices_of,
        hyperparameters=request.hyperparameters,
        aggregation=request.aggregation,
        secure_groups=request.secure_groups,
        protocol=request.protocol,
        differential_privacy=request.differential_privacy,
        privacy_spent=ledger.spent_by(session, task),
        hints=hints_of(session, request) if task.live or task.state == "proposed" else [],
        levels=request.levels,
        site=request.site,
        upstream=task.upstream is not None,
        deadlines=dict(request.deadlines.items()),
        model=task.model,
        weights_deleted=deleted_weights(session, [task.model]).get(task.model or "", (None, ""))[0],
        waiting=waiting,
        search=describe(session, task),
        created_by=task.created_by,
        approved_by=task.approved_by,
        waiting_for=reasons,
        under_way=under_way(session, task, now=now, window=window, smallest=smallest) if task.live else "",
        last_failure=last_failure(session, task),
        refused=refusals_of_task(session, task.task_id),
        created=task.created,
        ended=task.ended,
    )


_TASKS = OPERATOR | ANALYST
ROUTES = (
    Route("POST", "/v1/tasks", _TASKS, create_task, TaskRequest, TaskInfo, status=201, foresee=foresee_task),
    Route("GET", "/v1/tasks", READ, list_tasks, response=TaskPage, query=TaskQuery),
    Route("GET", "/v1/tasks/<id:task_id>", READ, show_task, response=TaskInfo),
    Route("POST", "/v1/tasks/<id:task_id>/approve", ANALYST, approve_task, response=TaskInfo),
    Route("POST", "/v1/tasks/<id:task_id>/cancel", _TASKS, cancel_task, response=TaskInfo),
    Route("POST", "/v1/tasks/<id:task_id>/pause", _TASKS, pause_task, response=TaskInfo),
    Route("POST", "/v1/tasks/<id:task_id>/resume", _TASKS, resume_task, response=TaskInfo),
)
