"""From a round's updates to what it was for: the next model version, metrics, or statistics.

Deterministic, so that a crash costs only time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from sqlalchemy import select
from sqlalchemy.orm import Session

from archipel import strategies
from archipel.bundle import Manifest, decode_manifest, write_weights
from archipel.errors import ServerError, ShareError
from archipel.protocol.messages import Cohort, RoundPlan, Unmasking
from archipel.protocol.sealed import decode
from archipel.protocol.secagg import unmask_sum
from archipel.protocol.uploads import upload_layout
from archipel.protocol.vector import DecodedSum, Vector
from archipel.server import folding
from archipel.server.frozen import read_cohort
from archipel.server.models import Answer, BundleRow, Round, Task
from archipel.server.resources import TaskRequest
from archipel.server.results import analysis, evaluation
from archipel.server.rounds import answered, read_plan
from archipel.server.services import Services
from archipel.server.tasks import request_of
from archipel.server.weights_log import endorsement, sum_digest


@dataclass(frozen=True)
class Collected:
    """Everything that a round in phase aggregating has collected. `pending` is not in its checkpoint yet; `weights` and
    `strategy_state` are what the sum is applied to. The last three are of secure rounds: U1, U2 and U4's answers."""

    current: Round
    plan: RoundPlan
    request: TaskRequest
    manifest: Manifest
    updates: int
    pending: list[folding.Pending]
    weights: str
    strategy_state: str | None
    survivors: list[str]
    sharers: list[str]
    cohort: Cohort | None
    answers: dict[str, Unmasking]


@dataclass(frozen=True)
class NewVersion:
    """Blobs that are durably stored already. `strategy_state` is None where the strategy keeps none; `sum_digest` is of
    the sum that it was made with, `evidence` the JSON of the messages.Endorsement of a secure round."""

    weights: str
    weights_size: int
    strategy_state: str | None
    strategy_state_size: int
    sum_digest: str
    evidence: bytes | None


@dataclass(frozen=True)
class Outcome:
    """Of `cohort` devices: a new version of a training task, else the JSON of a resources.RoundResult."""

    cohort: int
    weight_sum: float | None
    version: NewVersion | None = None
    result: dict[str, Any] | None = None


def aggregate(services: Services, round_id: str) -> Outcome:
    """Sum, unmask, decode, and make of it what the task is for.

    Memory is that of a few models, whatever the cohort's size. Raises ArchipelError when the round cannot be completed.
    """
    with services.database.read() as session:
        collected = _collect(session, round_id)
    plan, manifest = collected.plan, collected.manifest
    layout = upload_layout(manifest, plan.kind, plan.program, plan.metrics)
    total = folding.load(services.spool, collected.current, plan, layout)
    folding.fold(services.spool, total, collected.pending, collected.request.staleness_exponent)
    if isinstance(total, folding.MaskedSum):
        plain = _unmask(collected, total.total)
        decoded = layout.decode_sum(plain, cohort=collected.updates, modulus_bits=plan.modulus_bits)
    else:
        decoded = total.total.decoded()
    if plan.kind == "training":
        return Outcome(collected.updates, decoded.weight, version=_update(services, collected, decoded))
    made = (evaluation if plan.kind == "evaluation" else analysis)(plan, manifest, decoded, collected.updates)
    return Outcome(collected.updates, decoded.weight, result=msgspec.to_builtins(made))


def _collect(session: Session, round_id: str) -> Collected:
    current = session.get_one(Round, round_id)
    task = session.get_one(Task, current.task_id)
    bundle = session.get_one(BundleRow, task.bundle)
    plan = read_plan(current)
    # A buffer is what was folded into it; the updates that came since belong to the next one.
    waiting = [] if task.buffered else folding.pending(session, current, task)
    secure = plan.privacy == "secure"
    unmaskings = session.execute(
        select(Answer.device_id, Answer.body).where(Answer.round_id == round_id, Answer.phase == "unmasking")
    )
    return Collected(
        current=current,
        plan=plan,
        request=request_of(task),
        manifest=decode_manifest(bundle.manifest),
        updates=folding.folded(session, round_id) + len(waiting),
        pending=waiting,
        # Of an asynchronous task other rounds may have made versions meanwhile: the sum is of changes.
        weights=(task.model if task.mode == "asynchronous" else None) or plan.weights,
        strategy_state=task.strategy_state,
        survivors=answered(session, round_id, "masking"),
        sharers=answered(session, round_id, "sharing"),
        cohort=read_cohort(session, round_id) if secure else None,
        answers={row.device_id: decode("unmasking", row.body or b"", Unmasking) for row in unmaskings},
    )


def _unmask(collected: Collected, total: Vector) -> Vector:
    if collected.cohort is None:
        raise ServerError("a secure round without a cohort")
    answers = dict(collected.answers)
    while True:
        try:
            return unmask_sum(
                total,
                plan=collected.plan,
                cohort=collected.cohort,
                sharers=collected.sharers,
                survivors=collected.survivors,
                answers=answers,
            )
        except ShareError as error:
            # Where it is clear who sent wrong shares, the others' are enough if they still reach the threshold.
            blamed = set(error.devices) & set(answers)
            if not blamed:
                raise
            for device_id in blamed:
                del answers[device_id]


def _update(services: Services, collected: Collected, decoded: DecodedSum) -> NewVersion:
    strategy = strategies.get(collected.manifest.strategy)
    parameters = services.blobs.read_weights(collected.weights)
    state = {}
    if collected.strategy_state is not None:
        state = services.blobs.read_weights(collected.strategy_state)
    hyperparameters = collected.request.hyperparameters
    moved, state = strategy.update(parameters, state, decoded, collected.updates, hyperparameters)
    for name, array in moved.items():
        if not np.isfinite(array).all():
            raise ServerError(f"the new value of parameter {name!r} is not finite; lower the learning rates")
    with services.database.read() as session:
        evidence = endorsement(session, collected.current)
    weights = write_weights(moved)
    state_bytes = write_weights(state) if state else b""
    return NewVersion(
        weights=services.blobs.put(weights),
        weights_size=len(weights),
        strategy_state=services.blobs.put(state_bytes) if state_bytes else None,
        strategy_state_size=len(state_bytes),
        sum_digest=sum_digest(decoded),
        evidence=evidence,
    )
