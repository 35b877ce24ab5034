"""A rollout's state machine, as data, and its transitions, each within one transaction.

    soaking -> evaluating -> soaking (next stage) -> ... -> completed (the version is promoted)
    evaluating, without a good result -> rolled_back
    soaking or evaluating <-> paused; any of the three, when an operator says so -> rolled_back

Every state has a deadline, so no rollout can hang. What devices are offered follows from the rows that a transition
writes (archipel.server.registry.offers), so a rollback is one transaction too.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import msgspec
from sqlalchemy import or_, select
from sqlalchemy.orm import Session

from archipel.bundle import Manifest, decode_manifest
from archipel.errors import ArchipelError, PolicyError
from archipel.protocol.operator.registry import Gate, RolloutRequest
from archipel.protocol.operator.tasks import RoundResult, TaskRequest
from archipel.protocol.policy import check_validity
from archipel.server.audit import log as audit
from archipel.server.database.registry_tables import Model, ModelVersion, Rollout, RolloutStage
from archipel.server.database.tables import BundleRow, Round, Task
from archipel.server.database.task_requests import audited, decode_request
from archipel.server.devices.targeting import Target
from archipel.server.registry import versions as registry
from archipel.server.registry.gates import EvaluatedRound, Verdict, check_gate, evaluation_request, judge
from archipel.server.rounds.checks import check_task
from archipel.server.rounds.machine import MAX_REASON
from archipel.server.rounds.opening import add_task, new_task
from archipel.server.settings import Settings

PAUSE_SECONDS = 7 * 86400.0

_decode_request = lru_cache(maxsize=64)(msgspec.json.Decoder(RolloutRequest).decode)


class Move(enum.Enum):
    STAY = "stay"
    EVALUATE = "evaluate"
    COMPARE = "compare"
    GO_ON = "go on"
    ROLL_BACK = "roll back"


@dataclass(frozen=True)
class StateRule:
    """One row of the state machine. `seconds` says what sets the state's deadline: the stage, the gate, or a pause.

    At the deadline the move is `late`; if that is a rollback, `lacking` is the reason. A state that `evaluates` ends
    with the gate's verdict.
    """

    name: Literal["soaking", "evaluating", "paused"]
    seconds: Literal["stage", "gate", "pause"]
    late: Move
    lacking: str = ""
    evaluates: bool = False


RULES: Mapping[str, StateRule] = {
    rule.name: rule
    for rule in (
        StateRule("soaking", "stage", Move.EVALUATE),
        StateRule("evaluating", "gate", Move.ROLL_BACK, "the evaluation had no result in time", evaluates=True),
        StateRule("paused", "pause", Move.ROLL_BACK, "it was paused for too long"),
    )
}
"""A rollout in any other state has ended."""


@dataclass(frozen=True)
class Step:
    """What to do with a rollout now. With `reject` its version is rejected: not rolled out again until restored."""

    move: Move
    reason: str = ""
    reject: bool = False


STAY = Step(Move.STAY)


@dataclass(frozen=True)
class Transition:
    """The rollout's new state after `advance`."""

    rollout_id: str
    state: str
    stage: int
    reason: str = ""


def decide(
    rule: StateRule, *, gated: bool, verdict: Verdict | None, evaluated: bool, now: float, state_ends: float
) -> Step:
    """The step that is due. `evaluated`: the candidate's evaluation has a result, and the baseline's evaluation, on the
    same devices, must still begin."""
    # Before the deadline: a coordinator that did not run for a while must not discard a result that came in time.
    if rule.evaluates and verdict is not None:
        return Step(Move.GO_ON) if verdict.passed else Step(Move.ROLL_BACK, verdict.reason, verdict.measured)
    if now < state_ends:
        return Step(Move.COMPARE) if evaluated else STAY
    # Without a gate nothing measures the stage, so its time alone passes it.
    if rule.late is Move.EVALUATE and not gated:
        return Step(Move.GO_ON)
    return Step(rule.late, rule.lacking)


def request_of(rollout: Rollout) -> RolloutRequest:
    """The checked request, as it was stored."""
    return _decode_request(rollout.request)


def live_rollout(session: Session, model: str, *, lock: bool = False) -> Rollout | None:
    """The model's rollout that has not ended (there is at most one), or None."""
    query = select(Rollout).where(Rollout.model == model, Rollout.ended.is_(None))
    return session.scalars(query.with_for_update() if lock else query).one_or_none()


def next_step(session: Session, rollout: Rollout, now: float) -> Step:
    """The step that is due for the rollout now. It only reads."""
    rule = RULES.get(rollout.state)
    if rule is None:
        return STAY
    gate = request_of(rollout).gate
    verdict, evaluated = None, False
    if rule.evaluates and isinstance(gate, Gate):
        verdict = _verdict(session, rollout, gate)
        stage = session.get_one(RolloutStage, (rollout.rollout_id, rollout.stage))
        must_compare = gate.max_loss is not None and stage.baseline_task is None
        evaluated = must_compare and _evaluated_round(session, stage) is not None
    return decide(
        rule, gated=isinstance(gate, Gate), verdict=verdict, evaluated=evaluated, now=now, state_ends=rollout.state_ends
    )


def begin(session: Session, rollout: Rollout, now: float) -> None:
    """Store a new rollout and begin its first stage."""
    _set_stage(rollout, 1, now)
    session.add(rollout)
    _enter_stage(session, rollout, now)


def advance(session: Session, rollout_id: str, *, now: float, settings: Settings) -> Transition | None:
    """Take the rollout one step, if it is due. `session` is a writing transaction, so a kill leaves the old state."""
    # Locks in the order of archipel.server.registry.versions: the model, its rollout, tasks. The caller decided without
    # locks that a step is due, so it is decided again under them.
    name = session.scalar(select(Rollout.model).where(Rollout.rollout_id == rollout_id))
    model = session.get_one(Model, name, with_for_update=True)
    rollout = session.get_one(Rollout, rollout_id, with_for_update=True)
    step = next_step(session, rollout, now)
    if step.move is Move.STAY:
        return None
    if step.reason and step.reason == RULES["evaluating"].lacking:
        step = replace(step, reason=_explain_lateness(session, rollout, step.reason))
    if step.move in (Move.EVALUATE, Move.COMPARE):
        try:
            _evaluate(session, rollout, step.move, now, settings)
        except ArchipelError as error:
            # It would fail at every further step, too, and the stage would never end.
            step = Step(Move.ROLL_BACK, f"the evaluation cannot be made: {error}")
    elif step.move is Move.GO_ON:
        # A bundle that has expired since the rollout began is refused by further devices.
        try:
            check_expiry(session, model, rollout.version, now)
        except PolicyError as error:
            step = Step(Move.ROLL_BACK, str(error))
    if step.move is Move.ROLL_BACK:
        roll_back(session, rollout, step.reason, now=now, actor="coordinator", reject=step.reject)
    elif step.move is Move.GO_ON:
        _go_on(session, model, rollout, now)
    return Transition(rollout_id, rollout.state, rollout.stage, rollout.reason)


def roll_back(session: Session, rollout: Rollout, reason: str, *, now: float, actor: str, reject: bool = False) -> None:
    """Offer the baseline to all devices again, and end the evaluations. The caller has locked the rollout."""
    stage = session.get_one(RolloutStage, (rollout.rollout_id, rollout.stage))
    stage.ended = now
    # None where nothing was measured: that says nothing about the version.
    stage.passed = False if reject else None
    for task in _tasks(session, stage):
        if task.live or task.state == "proposed":
            task.state, task.reason, task.ended = "cancelled", "its rollout was rolled back", now
    if reject:
        version = session.get_one(ModelVersion, (rollout.model, rollout.version))
        version.rejected, version.reason = now, reason[:MAX_REASON]
    _end(session, rollout, "rolled_back", reason, now)
    registry.offer_anew(session, rollout.population, now)
    _audit(session, rollout, "rolled_back", now, actor, reason=rollout.reason, rejected=reject)


def pause(session: Session, rollout: Rollout, *, now: float, actor: str) -> None:
    """Stop the rollout until it is resumed, for PAUSE_SECONDS at most. The caller has locked it."""
    # Only the time that is left is stored: the pause must not use it up.
    rollout.resumes, rollout.left = rollout.state, max(rollout.state_ends - now, 0.0)
    rollout.state, rollout.state_ends = "paused", now + PAUSE_SECONDS
    _switch_tasks(session, rollout, "running", "paused")
    _audit(session, rollout, "pause", now, actor)


def resume(session: Session, rollout: Rollout, *, now: float, actor: str) -> None:
    """Continue in the state before the pause, with the time that was left then. The caller has locked the rollout."""
    rollout.state, rollout.state_ends = str(rollout.resumes), now + (rollout.left or 0.0)
    rollout.resumes = rollout.left = None
    _switch_tasks(session, rollout, "paused", "running")
    _audit(session, rollout, "resume", now, actor)


def pauses(session: Session, task_id: str) -> bool:
    """Whether the task is a gate's evaluation of a rollout that is paused."""
    of_stage = or_(RolloutStage.candidate_task == task_id, RolloutStage.baseline_task == task_id)
    query = select(Rollout.state).join(RolloutStage, RolloutStage.rollout_id == Rollout.rollout_id).where(of_stage)
    return session.scalar(query) == "paused"


def check_expiry(session: Session, model: Model, number: int, now: float) -> None:
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


def _go_on(session: Session, model: Model, rollout: Rollout, now: float) -> None:
    stage = session.get_one(RolloutStage, (rollout.rollout_id, rollout.stage))
    stage.ended, stage.passed = now, True
    if rollout.stage < len(request_of(rollout).stages):
        # The devices of a stage are among those of the next: their places are hashes with the same salt.
        _set_stage(rollout, rollout.stage + 1, now)
        _enter_stage(session, rollout, now)
        _audit(session, rollout, "stage", now, "coordinator", stage=rollout.stage, percent=rollout.percent)
        return
    _end(session, rollout, "completed", "", now)
    registry.set_promoted(
        session, model, rollout.version, below=model.promotion, how="rollout", now=now, actor="coordinator",
        rollout_id=rollout.rollout_id,
    )  # fmt: skip
    _audit(session, rollout, "completed", now, "coordinator")


def _set_stage(rollout: Rollout, number: int, now: float) -> None:
    stage = request_of(rollout).stages[number - 1]
    rollout.stage, rollout.percent = number, stage.percent
    rollout.state, rollout.state_ends = "soaking", now + stage.soak_seconds


def _enter_stage(session: Session, rollout: Rollout, now: float) -> None:
    session.flush()
    session.add(RolloutStage(rollout_id=rollout.rollout_id, stage=rollout.stage, started=now))
    registry.offer_anew(session, rollout.population, now)
    session.flush()


def _evaluate(session: Session, rollout: Rollout, move: Move, now: float, settings: Settings) -> None:
    """Begin the candidate's evaluation, or then the baseline's, on the same devices.

    Each is a query. Where queries need approval it waits for an analyst, who must not be the one who began the rollout.
    """
    request, gate = request_of(rollout), request_of(rollout).gate
    if not isinstance(gate, Gate):
        return
    stage = session.get_one(RolloutStage, (rollout.rollout_id, rollout.stage))
    which, number, same_devices_as = "candidate", rollout.version, None
    if move is Move.COMPARE:
        # The deadline stays: both evaluations share the gate's time.
        which, number, same_devices_as = "baseline", rollout.baseline, _evaluated_round(session, stage)
    else:
        rollout.state, rollout.state_ends = "evaluating", now + gate.seconds
    version = session.get_one(ModelVersion, (rollout.model, number))
    name = f"rollout-{rollout.rollout_id[:8]}-{rollout.stage}-{which}"
    checked = _checked_request(
        session, gate, version, name, rollout.population, request.eligibility, settings.max_update_bytes, now,
        same_devices_as,
    )  # fmt: skip
    # Derived, not random: the same stage never has two tasks for one evaluation.
    task_id = hashlib.sha256(f"{rollout.rollout_id}/{rollout.stage}/{which}_task".encode()).hexdigest()[:32]
    part = Target(rollout.eligibility, rollout.salt, rollout.percent)
    task = new_task(
        checked, task_id=task_id, request_digest=None, now=now, part=part, created_by=rollout.created_by,
        proposed=settings.query_approval,
    )  # fmt: skip
    add_task(session, task)
    setattr(stage, f"{which}_task", task_id)
    audit.append(session, now, "coordinator", "task.create", task_id, rollout=rollout.rollout_id, **audited(task))


def _evaluated_round(session: Session, stage: RolloutStage) -> EvaluatedRound | None:
    query = select(Round.round_id, Round.result).where(
        Round.task_id == stage.candidate_task, Round.phase == "committed"
    )
    row = session.execute(query.limit(1)).one_or_none()
    return None if row is None else EvaluatedRound(row.round_id, msgspec.convert(row.result, RoundResult).devices)


def _explain_lateness(session: Session, rollout: Rollout, reason: str) -> str:
    """The `reason`, with what the evaluation was still waiting for."""
    stage = session.get_one(RolloutStage, (rollout.rollout_id, rollout.stage))
    which = "candidate" if stage.baseline_task is None else "baseline"
    task = session.get_one(Task, stage.baseline_task or stage.candidate_task)
    if task.state == "proposed":
        return f"{reason}: that of the {which} was not approved (archipel task approve {task.task_id})"
    failed = select(Round.reason).where(Round.task_id == task.task_id, Round.phase == "failed")
    last = session.scalar(failed.order_by(Round.ended.desc()).limit(1))
    needed = decode_request(task.request).min_cohort
    return f"{reason}: that of the {which} needs {needed} devices at a time" + (f" ({last})" if last else "")


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


def _verdict(session: Session, rollout: Rollout, gate: Gate) -> Verdict | None:
    stage = session.get_one(RolloutStage, (rollout.rollout_id, rollout.stage))
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


def _tasks(session: Session, stage: RolloutStage) -> list[Task]:
    ids = [each for each in (stage.candidate_task, stage.baseline_task) if each is not None]
    # Tasks are locked last; archipel.server.registry.versions has the order.
    return [session.get_one(Task, task_id, with_for_update=True) for task_id in ids]


def _switch_tasks(session: Session, rollout: Rollout, before: str, after: str) -> None:
    for task in _tasks(session, session.get_one(RolloutStage, (rollout.rollout_id, rollout.stage))):
        if task.state == before:
            task.state = after


def _end(session: Session, rollout: Rollout, state: str, reason: str, now: float) -> None:
    rollout.state, rollout.state_ends, rollout.ended = state, now, now
    rollout.reason = reason[:MAX_REASON]
    rollout.resumes = rollout.left = None
    session.flush()


def _audit(session: Session, rollout: Rollout, what: str, now: float, actor: str, **detail: Any) -> None:
    session.flush()
    version = f"{rollout.model}/{rollout.version}"
    audit.append(session, now, actor, f"rollout.{what}", rollout.rollout_id, version=version, **detail)
