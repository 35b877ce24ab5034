"""From a round's spooled updates to the next model version: deterministic, so that a crash costs only time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from sqlalchemy import select
from sqlalchemy.orm import Session

from archipel import strategies
from archipel.bundle import Manifest, decode_manifest, write_weights
from archipel.errors import ServerError, ShareError
from archipel.protocol.messages import Cohort, RoundPlan, Unmasking
from archipel.protocol.sealed import decode
from archipel.protocol.secagg import add_masked, unmask_sum
from archipel.protocol.vector import DecodedSum, Layout, Vector, unpack
from archipel.server.frozen import read_cohort
from archipel.server.models import Answer, BundleRow, Round, Task
from archipel.server.rounds import answered, read_plan
from archipel.server.services import Services
from archipel.server.task_checks import update_program


@dataclass(frozen=True)
class Collected:
    """Everything that a round in phase aggregating has collected. `updates` maps each survivor (U3) to its digest."""

    plan: RoundPlan
    manifest: Manifest
    cohort: Cohort
    sharers: list[str]
    updates: dict[str, str]
    answers: dict[str, Unmasking]
    hyperparameters: dict[str, float]
    strategy_state: str | None


@dataclass(frozen=True)
class NewVersion:
    """Blobs that are durably stored already. `strategy_state` is None where the strategy keeps none."""

    weights: str
    weights_size: int
    strategy_state: str | None
    strategy_state_size: int
    weight_sum: float | None
    cohort: int


def aggregate(services: Services, round_id: str) -> NewVersion:
    """Sum, unmask, decode, let the strategy make the new parameters, and store them.

    Memory is that of a few models, whatever the cohort's size. Raises ArchipelError when the round cannot be completed.
    """
    with services.database.read() as session:
        collected = _collect(session, round_id)
    layout = Layout.of(update_program(collected.manifest))
    total = _fold(services, collected, layout)
    plain = _unmask(collected, total)
    decoded = layout.decode_sum(plain, cohort=len(collected.updates), modulus_bits=collected.plan.modulus_bits)
    return _update(services, collected, decoded)


def _collect(session: Session, round_id: str) -> Collected:
    current = session.get_one(Round, round_id)
    task = session.get_one(Task, current.task_id)
    bundle = session.get_one(BundleRow, task.bundle)
    updates = session.execute(
        select(Answer.device_id, Answer.digest)
        .where(Answer.round_id == round_id, Answer.phase == "masking")
        .order_by(Answer.device_id)
    )
    unmaskings = session.execute(
        select(Answer.device_id, Answer.body).where(Answer.round_id == round_id, Answer.phase == "unmasking")
    )
    return Collected(
        plan=read_plan(current),
        manifest=decode_manifest(bundle.manifest),
        cohort=read_cohort(session, round_id),
        sharers=answered(session, round_id, "sharing"),
        updates={row.device_id: row.digest for row in updates},
        answers={row.device_id: decode("unmasking", row.body or b"", Unmasking) for row in unmaskings},
        hyperparameters=dict(task.hyperparameters),
        strategy_state=task.strategy_state,
    )


def _fold(services: Services, collected: Collected, layout: Layout) -> Vector:
    plan = collected.plan
    total = np.zeros(layout.length, np.uint32)
    for device_id, digest in collected.updates.items():
        data = services.spool.read(plan.round_id, device_id, digest)
        add_masked(total, unpack(data, layout.length, plan.modulus_bits), plan.modulus_bits)
    return total


def _unmask(collected: Collected, total: Vector) -> Vector:
    answers = dict(collected.answers)
    while True:
        try:
            return unmask_sum(
                total,
                plan=collected.plan,
                cohort=collected.cohort,
                sharers=collected.sharers,
                survivors=list(collected.updates),
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
    parameters = services.blobs.read_weights(collected.plan.weights)
    state = {}
    if collected.strategy_state is not None:
        state = services.blobs.read_weights(collected.strategy_state)
    cohort = len(collected.updates)
    moved, state = strategy.update(parameters, state, decoded, cohort, collected.hyperparameters)
    for name, array in moved.items():
        if not np.isfinite(array).all():
            raise ServerError(f"the new value of parameter {name!r} is not finite; lower the learning rates")
    weights = write_weights(moved)
    state_bytes = write_weights(state) if state else b""
    return NewVersion(
        weights=services.blobs.put(weights),
        weights_size=len(weights),
        strategy_state=services.blobs.put(state_bytes) if state_bytes else None,
        strategy_state_size=len(state_bytes),
        weight_sum=decoded.weight,
        cohort=cohort,
    )
