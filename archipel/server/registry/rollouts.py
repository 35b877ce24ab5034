"""A rollout's state machine, as data, and its transitions, each within one transaction.

    soaking -> evaluating -> soaking (next stage) -> ... -> completed (the version is promoted)
    evaluating, without a good result -> rolled_back
    soaking or evaluating <-> paused; any of the three, when an operator says so -> rolled_back

Every state has a deadline, so no rollout can hang. What devices are offered follows from the rows that a transition
writes (archipel.server.registry.offers), so a rollback is one transaction too.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from sqlalchemy import or_, select
from sqlalchemy.orm import Session

from archipel.errors import ArchipelError, PolicyError
from archipel.protocol.operator.registry import Gate
from archipel.server.audit import log as audit
from archipel.server.database.registry_tables import Model, ModelVersion, Rollout, RolloutStage
from archipel.server.registry import stage_evaluations as stages
from archipel.server.registry import versions as registry
from archipel.server.registry.gates import Verdict
from archipel.server.registry.stage_evaluations import request_of
from archipel.server.rounds.machine import MAX_REASON
from archipel.server.settings import Settings

PAUSE_SECONDS = 7 * 86400.0


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


def live_rollout(session: Session, model: str, *, lock: bool = False) -> Rollout | None:
    """The model's rollout that has not ended (there is at most one), or None."""
    query = select(Rollout).where(Rollout.model == model, Rollout.ended.is_(None))
    return session.scalars(query.with_for_update() if lock else query).one_or_none()


def next_step(session: Session, rollout: Rollout, now: float, settings: Settings) -> Step:
    """The step that is due for the rollout now. It only reads."""
    rule = RULES.get(rollout.state)
    if rule is None:
        return STAY
    gate = request_of(rollout).gate
    verdict, evaluated = None, False
    if rule.evaluates and isinstance(gate, Gate):
        verdict = stages.verdict(session, rollout, gate)
        stage = stages.stage_of(session, rollout)
        must_compare = gate.max_loss is not None and stage.baseline_task is None
        evaluated = must_compare and stages.evaluated_round(session, stage) is not None
    step = decide(
        rule, gated=isinstance(gate, Gate), verdict=verdict, evaluated=evaluated, now=now, state_ends=rollout.state_ends
    )
    if rule.evaluates and step.move is Move.STAY:
        why = stages.hopeless(session, rollout, smallest=settings.smallest_answer)
        step = Step(Move.ROLL_BACK, why) if why else step
    return step


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
    step = next_step(session, rollout, now, settings)
    if step.move is Move.STAY:
        return None
    if step.reason and step.reason == RULES["evaluating"].lacking:
        step = replace(step, reason=stages.explain_lateness(session, rollout, step.reason, now=now, settings=settings))
    if step.move in (Move.EVALUATE, Move.COMPARE):
        try:
            _evaluate(session, rollout, step.move, now, settings)
        except ArchipelError as error:
            # It would fail at every further step, too, and the stage would never end.
            step = Step(Move.ROLL_BACK, f"the evaluation cannot be made: {error}")
    elif step.move is Move.GO_ON:
        # A bundle that has expired since the rollout began is refused by further devices.
        try:
            stages.check_version(session, model, rollout.version, now)
        except PolicyError as error:
            step = Step(Move.ROLL_BACK, str(error))
    if step.move is Move.ROLL_BACK:
        roll_back(session, rollout, step.reason, now=now, actor="coordinator", reject=step.reject)
    elif step.move is Move.GO_ON:
        _go_on(session, model, rollout, now)
    return Transition(rollout_id, rollout.state, rollout.stage, rollout.reason)


def roll_back(session: Session, rollout: Rollout, reason: str, *, now: float, actor: str, reject: bool = False) -> None:
    """Offer the baseline to all devices again, and end the evaluations. The caller has locked the rollout."""
    stage = stages.stage_of(session, rollout)
    stage.ended = now
    # None where nothing was measured: that says nothing about the version.
    stage.passed = False if reject else None
    for task in stages.tasks_of(session, stage):
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


def _evaluate(session: Session, rollout: Rollout, move: Move, now: float, settings: Settings) -> None:
    gate = request_of(rollout).gate
    if isinstance(gate, Gate) and move is Move.EVALUATE:
        # For the baseline the deadline stays: both evaluations share the gate's time.
        rollout.state, rollout.state_ends = "evaluating", now + gate.seconds
    which: Literal["candidate", "baseline"] = "candidate" if move is Move.EVALUATE else "baseline"
    stages.evaluate(session, rollout, which, now, settings)


def _go_on(session: Session, model: Model, rollout: Rollout, now: float) -> None:
    stage = stages.stage_of(session, rollout)
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


def _switch_tasks(session: Session, rollout: Rollout, before: str, after: str) -> None:
    for task in stages.tasks_of(session, stages.stage_of(session, rollout)):
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
