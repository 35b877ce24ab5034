"""The evaluations of a rollout's stages: the tasks that ask for them, and what has come of them.

A stage is evaluated with the candidate first, and then, on the devices of that sum, with the version that it is
compared with. Each evaluation is a query. Where queries need approval it waits for an analyst, who must not be the one
who began the rollout.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import Literal

import msgspec
from sqlalchemy import select
from sqlalchemy.orm import Session

from archipel.bundle import Manifest, decode_manifest
from archipel.errors import ServerError
from archipel.protocol.operator.registry import Gate, RolloutRequest
from archipel.protocol.operator.results import RoundResult
from archipel.protocol.operator.tasks import TaskRequest
from archipel.protocol.policy import check_validity
from archipel.server.audit import log as audit
from archipel.server.database.registry_tables import Model, ModelVersion, Rollout, RolloutStage
from archipel.server.database.tables import BundleRow, Round, Task
from archipel.server.database.task_requests import audited, decode_request
from archipel.server.devices.smallest_answer import hides
from archipel.server.devices.targeting import Target
from archipel.server.registry.gates import EvaluatedRound, Verdict, check_gate, evaluation_request, judge
from archipel.server.registry.stage_devices import too_few
from archipel.server.rounds.candidates import count_candidates
from archipel.server.rounds.checks import check_task
from archipel.server.rounds.opening import add_task, new_task
from archipel.server.settings import Settings

Which = Literal["candidate", "baseline"]

_decode_request = lru_cache(maxsize=64)(msgspec.json.Decoder(RolloutRequest).decode)


def request_of(rollout: Rollout) -> RolloutRequest:
    """The checked request, as it was stored."""
    return _decode_request(rollout.request)


def check_version(session: Session, model: Model, number: int, now: float) -> None:
    """Raise PolicyError if the version's bundle has expired: devices refuse it then."""
    version = session.get_one(ModelVersion, (model.name, number))
    check_validity(_manifest(session, version), model.population, now)


def check_evaluations(
    session: Session,
    request: RolloutRequest,
    candidate: ModelVersion,
    baseline: ModelVersion,
    population: str,
    max_update_bytes: int,
    now: float,
) -> None:
    """Raise an ArchipelError if an evaluation that the gate asks for is impossible: no rollout should begin in vain."""
    gate = request.gate
    if isinstance(gate, Gate):
        check_gate(gate)
        for version in [candidate, baseline][: 1 if gate.max_loss is None else 2]:
            _checked_request(session, gate, version, "check", population, request.eligibility, max_update_bytes, now)


def evaluate(session: Session, rollout: Rollout, which: Which, now: float, settings: Settings) -> None:
    """Begin an evaluation of the stage, in a transaction that has locked the rollout and set its deadline.

    Raises ArchipelError if it is impossible, or if too few devices could take part.
    """
    gate = request_of(rollout).gate
    if not isinstance(gate, Gate):
        return
    task = make_task(session, rollout, gate, which, now, settings)
    if why := too_few(session, task, by=rollout.state_ends, smallest=settings.smallest_answer):
        raise ServerError(f"stage {rollout.stage}: {why}")
    add_task(session, task)
    setattr(stage_of(session, rollout), f"{which}_task", task.task_id)
    audit.append(session, now, "coordinator", "task.create", task.task_id, rollout=rollout.rollout_id, **audited(task))


def make_task(session: Session, rollout: Rollout, gate: Gate, which: Which, now: float, settings: Settings) -> Task:
    """The task of an evaluation of the stage, not stored. Raises ArchipelError if it is impossible."""
    number, same_devices_as = rollout.version, None
    if which == "baseline":
        number, same_devices_as = rollout.baseline, evaluated_round(session, stage_of(session, rollout))
    version = session.get_one(ModelVersion, (rollout.model, number))
    name = f"rollout-{rollout.rollout_id[:8]}-{rollout.stage}-{which}"
    checked = _checked_request(
        session, gate, version, name, rollout.population, request_of(rollout).eligibility, settings.max_update_bytes,
        now, same_devices_as,
    )  # fmt: skip
    # Derived, not random: the same stage never has two tasks for one evaluation.
    task_id = hashlib.sha256(f"{rollout.rollout_id}/{rollout.stage}/{which}_task".encode()).hexdigest()[:32]
    part = Target(rollout.eligibility, rollout.salt, rollout.percent)
    return new_task(
        checked, task_id=task_id, request_digest=None, now=now, part=part, created_by=rollout.created_by,
        proposed=settings.query_approval,
    )  # fmt: skip


def evaluated_round(session: Session, stage: RolloutStage) -> EvaluatedRound | None:
    """The round that evaluated the candidate; None while there is none."""
    query = select(Round.round_id, Round.result).where(
        Round.task_id == stage.candidate_task, Round.phase == "committed"
    )
    row = session.execute(query.limit(1)).one_or_none()
    return None if row is None else EvaluatedRound(row.round_id, msgspec.convert(row.result, RoundResult).devices)


def under_way(session: Session, stage: RolloutStage) -> tuple[Which, Task] | None:
    """Which evaluation of the stage began last, and its task; None before the first."""
    if stage.baseline_task is not None:
        return "baseline", session.get_one(Task, stage.baseline_task)
    return None if stage.candidate_task is None else ("candidate", session.get_one(Task, stage.candidate_task))


def explain_lateness(session: Session, rollout: Rollout, reason: str, *, now: float, settings: Settings) -> str:
    """The `reason`, with what the evaluation was still waiting for, and how many devices waited.

    Everybody who may read the rollout reads it, so a number that depends on attributes is left out.
    """
    begun = under_way(session, stage_of(session, rollout))
    if begun is None:
        return reason
    which, task = begun
    if task.state == "proposed":
        return f"{reason}: that of the {which} was not approved (archipel task approve {task.task_id})"
    failed = select(Round.reason).where(Round.task_id == task.task_id, Round.phase == "failed")
    last = session.scalar(failed.order_by(Round.ended.desc()).limit(1))
    needed, waited = decode_request(task.request).min_cohort, ""
    if task.live and not hides(task.eligibility, settings.smallest_answer):
        count = count_candidates(session, task, now=now, window=settings.check_in_window)
        waited = f", and {count or 'none'} waited at the end"
    return f"{reason}: that of the {which} needs {needed} devices at a time{waited}" + (f" ({last})" if last else "")


def hopeless(session: Session, rollout: Rollout, *, smallest: int) -> str:
    """Why too few devices can take part in the evaluation that is under way; empty if they can, or a round runs."""
    begun = under_way(session, stage_of(session, rollout))
    if begun is None or not begun[1].live:
        return ""
    task = begun[1]
    if session.scalar(select(Round.round_id).where(Round.task_id == task.task_id, Round.ended.is_(None)).limit(1)):
        return ""
    why = too_few(session, task, by=rollout.state_ends, smallest=smallest)
    return f"stage {rollout.stage}: {why}" if why else ""


def verdict(session: Session, rollout: Rollout, gate: Gate) -> Verdict | None:
    """What the results so far say; None while another is needed."""
    stage = stage_of(session, rollout)
    results: list[RoundResult | None] = []
    for task_id, number in ((stage.candidate_task, rollout.version), (stage.baseline_task, rollout.baseline)):
        task = None if task_id is None else session.get_one(Task, task_id)
        results.append(None if task is None else result_of(session, task))
        # A task that has ended without a result will never have one, so the deadline need not be waited for.
        if task is not None and results[-1] is None and not task.live and task.state != "proposed":
            return Verdict(False, f"the evaluation of version {number} is {task.state}: {task.reason}")
    return judge(gate, *results)


def result_of(session: Session, task: Task) -> RoundResult | None:
    """The result of an evaluation task's committed round; None if there is none."""
    query = select(Round.result).where(Round.task_id == task.task_id, Round.phase == "committed").limit(1)
    result = session.scalar(query)
    return None if result is None else msgspec.convert(result, RoundResult)


def stage_of(session: Session, rollout: Rollout) -> RolloutStage:
    """The stage that the rollout is in."""
    return session.get_one(RolloutStage, (rollout.rollout_id, rollout.stage))


def tasks_of(session: Session, stage: RolloutStage) -> list[Task]:
    """The stage's evaluations so far, locked."""
    ids = [each for each in (stage.candidate_task, stage.baseline_task) if each is not None]
    # Tasks are locked last; archipel.server.registry.versions has the order.
    return [session.get_one(Task, task_id, with_for_update=True) for task_id in ids]


def _checked_request(
    session: Session,
    gate: Gate,
    version: ModelVersion,
    name: str,
    population: str,
    eligibility: str,
    most: int,
    now: float,
    same_devices_as: EvaluatedRound | None = None,
) -> TaskRequest:
    manifest = _manifest(session, version)
    check_validity(manifest, population, now)
    asked = evaluation_request(
        gate, name=name, population=population, bundle=version.bundle, weights=version.weights,
        eligibility=eligibility, same_devices_as=same_devices_as,
    )  # fmt: skip
    return check_task(asked, manifest, max_update_bytes=most)


def _manifest(session: Session, version: ModelVersion) -> Manifest:
    return decode_manifest(session.get_one(BundleRow, version.bundle).manifest)
