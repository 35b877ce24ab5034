"""Evaluations of a training's versions: after every n-th committed round, by the training's `evaluate_every`.

Each is a task of kind evaluation, made in the transaction that commits the round, under an id that follows from the
round's: a kill leaves both or none. While it runs, the training opens no round, so that it gets the devices. It is not
tried twice: it fails with its first round, or when none could begin in the time of phase assigning. The training then
goes on, and its curve lacks a point.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from archipel.bundle import Manifest, decode_manifest
from archipel.errors import ArchipelError, ServerError
from archipel.protocol.metrics.measures import measures
from archipel.protocol.metrics.training_metrics import metric_ranges
from archipel.protocol.mistakes import split, tell
from archipel.protocol.operator.differential_privacy import DifferentialPrivacy
from archipel.protocol.operator.tasks import TaskRequest
from archipel.protocol.uploads import upload_program
from archipel.server.audit import log as audit
from archipel.server.database.tables import BundleRow, Round, Task
from archipel.server.database.task_requests import audited, request_of
from archipel.server.rounds.assigning import let_go
from archipel.server.rounds.candidates import count_candidates
from archipel.server.rounds.checks import check_task
from archipel.server.rounds.machine import deadline, fail_task
from archipel.server.rounds.opening import Write, add_task, new_task
from archipel.server.rounds.waiting import waiting_for
from archipel.server.settings import Settings

if TYPE_CHECKING:
    from archipel.server.services import Services

log = logging.getLogger("archipel.coordinator")

_MAX_NAME = 128


def check_evaluations(request: TaskRequest, manifest: Manifest, *, max_update_bytes: int) -> None:
    """Refuse a training whose evaluations would be refused, or are more than the bundle allows.

    Raises the ArchipelError that names the setting and its bound.
    """
    if request.evaluate_every is None:
        return
    if request.mode == "asynchronous":
        raise ServerError(
            "evaluate_every: the devices of an asynchronous task are always at work; leave it out, and evaluate its "
            "versions with tasks of kind evaluation"
        )
    if request.evaluation_noise.is_private and request.evaluation_noise.noise_multiplier is None:
        raise ServerError(
            "evaluation_noise: noise_multiplier is missing, which says how much noise each evaluation has; the "
            "training's own multiplier then leaves room for all evaluations within its epsilon"
        )
    number, allowed = request.rounds // request.evaluate_every, manifest.privacy.queries
    if number > allowed:
        raise ServerError(
            f"evaluate_every: {request.evaluate_every} of {request.rounds} rounds makes {number} evaluations; bundle "
            f"{manifest.name!r} allows {allowed} queries in {manifest.privacy.query_days} days"
        )
    try:
        check_task(evaluation_request(request, manifest, None, 1), manifest, max_update_bytes=max_update_bytes)
    except ArchipelError as error:
        raise ServerError(tell([f"evaluate_every: {each}" for each in split(str(error))])) from None


def evaluation_request(request: TaskRequest, manifest: Manifest, weights: str | None, number: int) -> TaskRequest:
    """The evaluation of the training's version `number`. Raises ServerError where no metric has a known range."""
    return TaskRequest(
        name=f"{request.name[: _MAX_NAME - 24]}-evaluation-{number}",
        population=request.population,
        bundle=request.bundle,
        weights=weights,
        rounds=1,
        kind="evaluation",
        privacy=request.privacy,
        min_cohort=request.min_cohort,
        cohort=request.cohort,
        levels=request.levels,
        site=request.site,
        min_contributors=request.min_contributors,
        metrics=dict(request.metrics or _trained_metrics(manifest)),
        distributions=request.distributions,
        max_examples=request.max_examples,
        eligibility=request.eligibility,
        deadlines=request.deadlines,
        differential_privacy=_noise_of(request),
    )


def _noise_of(request: TaskRequest) -> DifferentialPrivacy:
    """That of the training's evaluations, which count against the training's own epsilon where they have none."""
    noise, training = request.evaluation_noise, request.differential_privacy
    if not noise.is_private or noise.epsilon is not None or training.epsilon is None:
        return noise
    return msgspec.structs.replace(noise, epsilon=training.epsilon, delta=training.delta)


def evaluate_version(session: Session, current: Round, task: Task, *, settings: Settings, now: float) -> None:
    """Make the evaluation of the version that `current` has made, if it is due. The caller commits that round."""
    request = request_of(task)
    number = task.rounds_committed
    if task.kind != "training" or request.evaluate_every is None or number % request.evaluate_every:
        return
    manifest = decode_manifest(session.get_one(BundleRow, task.bundle).manifest)
    try:
        asked = evaluation_request(request, manifest, task.model, number)
        checked = check_task(asked, manifest, max_update_bytes=settings.max_update_bytes)
    except ArchipelError as error:  # checked with the task, so a setting of the server was changed since
        log.warning("task %s: version %s cannot be evaluated: %s", task.task_id, number, error)
        return
    made = new_task(
        checked,
        task_id=hashlib.sha256(f"{current.round_id}/evaluation".encode()).hexdigest()[:32],
        request_digest=None,
        now=now,
        created_by=task.created_by,
        proposed=settings.query_approval,
        evaluates=current.round_id,
    )
    add_task(session, made)
    audit.append(session, now, "coordinator", "task.create", made.task_id, training=task.task_id, **audited(made))


def cancel_evaluations(session: Session, task: Task, *, now: float, actor: str) -> None:
    """Cancel the evaluations of a training that `actor` cancels, in the same transaction: nobody waits for them."""
    of_task = select(Round.round_id).where(Round.task_id == task.task_id)
    unfinished = select(Task).where(Task.evaluates.in_(of_task), Task.ended.is_(None)).with_for_update()
    for evaluation in session.scalars(unfinished).all():
        evaluation.state, evaluation.reason, evaluation.ended = "cancelled", "its training was cancelled", now
        audit.append(session, now, actor, "task.cancel", evaluation.task_id, training=task.task_id)
        let_go(session, evaluation)


def end_idle(services: Services, write: Write) -> bool:
    """Fail the evaluations of trainings that could begin no round in time. Returns whether there were any."""
    now, settings = services.clock(), services.settings
    with services.database.read() as session:
        running = select(Task).where(Task.state == "running", Task.evaluates.is_not(None))
        late = {}
        for task in session.scalars(running):
            if _is_late(session, task, now):
                waiting = count_candidates(session, task, now=now, window=settings.check_in_window)
                late[task.task_id] = waiting_for(
                    session, task, waiting, now=now, window=settings.check_in_window, smallest=settings.smallest_answer
                )
    for task_id, why in late.items():
        with write() as session:
            task = session.get_one(Task, task_id, with_for_update=True)
            if task.live and _is_late(session, task, now):
                within = f"no round could begin within {deadline(task, 'assigning'):g} s"
                fail_task(session, task, f"{within}: {why}" if why else within, now=now)
    return bool(late)


def _is_late(session: Session, task: Task, now: float) -> bool:
    # One that somebody had to approve keeps no training waiting.
    if task.approved_by is not None:
        return False
    of_task = select(Round.round_id).where(Round.task_id == task.task_id)
    if session.scalar(of_task.where(Round.ended.is_(None)).limit(1)) is not None:
        return False
    # A failed round that does not count against the task is held again, and has the same time from then on.
    last = session.scalar(select(func.max(Round.ended)).where(Round.task_id == task.task_id)) or task.created
    return now >= last + deadline(task, "assigning")


def _trained_metrics(manifest: Manifest) -> Mapping[str, float]:
    """The metrics of the evaluation that training reports too, with their ranges."""
    ranges = metric_ranges(manifest)
    known = measures(upload_program(manifest, "evaluation"))
    found = {name: ranges[name] for name in known if name in ranges}
    if not found:
        raise ServerError(f"metrics: name at least one with its range; bundle {manifest.name!r} has {sorted(known)}")
    return found
