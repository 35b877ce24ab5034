"""Records what a round made: the new version, its entry in the weights log, and the task's new model."""

from __future__ import annotations

from sqlalchemy.orm import Session

from archipel.server.database.tables import Round, Task, Version
from archipel.server.database.task_requests import request_of
from archipel.server.devices import spoiler_search as search
from archipel.server.rounds import evaluating, reach, weights_log
from archipel.server.rounds.aggregation import Outcome
from archipel.server.rounds.machine import answered, commit_round
from archipel.server.settings import Settings
from archipel.server.storage.blob_rows import record_blob
from archipel.server.storage.blobs import BlobStore


def record_result(
    session: Session,
    current: Round,
    task: Task,
    outcome: Outcome,
    *,
    settings: Settings,
    blobs: BlobStore,
    now: float,
) -> None:
    """Record the result and commit the round, in the caller's transaction, which has locked round and task."""
    current.weight_sum = outcome.weight_sum
    current.result = outcome.result
    version = outcome.version
    if version is not None:
        for digest, kind, size in (
            (version.weights, "weights", version.weights_size),
            (version.strategy_state, "state", version.strategy_state_size),
            (version.rule_state, "state", version.rule_state_size),
        ):
            if digest is not None:
                record_blob(session, blobs, digest=digest, kind=kind, size=size, now=now)
        reach.extend(session, task.population, task.task_id, version.weights)
        session.add(
            Version(
                task_id=task.task_id,
                number=task.rounds_committed + 1,
                weights=version.weights,
                strategy_state=version.strategy_state,
                parent=task.model,
                round_id=current.round_id,
                cohort=outcome.cohort,
                weight_sum=outcome.weight_sum,
                created=now,
            )
        )
        # Before `task.model` changes: the entry names the model that the step began with.
        bundle_log = weights_log.Log(task.population, task.bundle, settings.private_key)
        # Of a round with groups the entry names one: devices that were in that group endorse it.
        grouped = current.part_of is not None
        sites = request_of(task).levels > 0
        devices = len(answered(session, current.round_id, "masking")) if grouped or sites else outcome.cohort
        leaves = outcome.cohort if sites else 0
        weights_log.step(session, bundle_log, current, task, version, devices, leaves)
        current.weights_out = version.weights
        current.step_norm, current.state_norm = version.step.parameters, version.step.state
        current.step_scale = version.step.scale
        task.model = version.weights
        task.strategy_state = version.strategy_state
        task.rule_state = version.rule_state
    search.after_success(session, current, task, settings=settings, now=now)
    commit_round(session, current, task, now=now, note="" if version is None else version.step.note)
    evaluating.evaluate_version(session, current, task, settings=settings, now=now)
