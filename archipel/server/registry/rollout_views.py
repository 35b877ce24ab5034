"""Rollouts as the API shows them. A page takes the same few queries however many items it has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
from sqlalchemy import select
from sqlalchemy.orm import Session

from archipel.protocol.operator.registry import Gate, RolloutInfo, Stage, StageEvaluation, StageInfo
from archipel.protocol.operator.results import RoundResult
from archipel.server.database.registry_tables import Rollout, RolloutStage
from archipel.server.database.tables import Round, Task
from archipel.server.registry.stage_evaluations import request_of


@dataclass(frozen=True)
class _Evaluations:
    """States and results of evaluation tasks, by their ids."""

    states: Mapping[str, str]
    results: Mapping[str, RoundResult]

    def show(self, version: int, task_id: str | None, gate: Gate | str) -> StageEvaluation | None:
        if task_id is None:
            return None
        result = self.results.get(task_id)
        value = result.metrics.get(gate.metric) if result is not None and isinstance(gate, Gate) else None
        return StageEvaluation(
            version=version,
            task_id=task_id,
            state=self.states[task_id],  # type: ignore[arg-type]
            devices=None if result is None else result.devices,
            examples=None if result is None else result.examples,
            value=value,
        )


def describe_rollouts(
    session: Session, rollouts: Sequence[Rollout], explain: Callable[[Rollout], str]
) -> list[RolloutInfo]:
    """Describe the rollouts, in the same order. `explain` says what one waits for."""
    begun = select(RolloutStage).where(RolloutStage.rollout_id.in_([each.rollout_id for each in rollouts]))
    rows = {(row.rollout_id, row.stage): row for row in session.scalars(begun)}
    evaluations = _evaluations(session, list(rows.values()))
    return [_rollout(each, rows, evaluations, explain(each)) for each in rollouts]


def _evaluations(session: Session, rows: Sequence[RolloutStage]) -> _Evaluations:
    ids = [task for row in rows for task in (row.candidate_task, row.baseline_task) if task is not None]
    states = select(Task.task_id, Task.state).where(Task.task_id.in_(ids))
    committed = select(Round.task_id, Round.result).where(Round.task_id.in_(ids), Round.phase == "committed")
    return _Evaluations(
        states={row.task_id: row.state for row in session.execute(states)},
        results={row.task_id: msgspec.convert(row.result, RoundResult) for row in session.execute(committed)},
    )


def _rollout(
    rollout: Rollout, rows: Mapping[tuple[str, int], RolloutStage], evaluations: _Evaluations, waits: str
) -> RolloutInfo:
    request = request_of(rollout)
    return RolloutInfo(
        rollout_id=rollout.rollout_id,
        model=rollout.model,
        population=rollout.population,
        version=rollout.version,
        baseline=rollout.baseline,
        state=rollout.state,  # type: ignore[arg-type]
        state_ends=rollout.state_ends,
        reason=rollout.reason,
        waiting_for=waits,
        stage=rollout.stage,
        stages=[
            _stage(rollout, asked, rows.get((rollout.rollout_id, number)), evaluations)
            for number, asked in enumerate(request.stages, start=1)
        ],
        eligibility=rollout.eligibility,
        gate=request.gate,
        created=rollout.created,
        ended=rollout.ended,
    )


def _stage(rollout: Rollout, asked: Stage, row: RolloutStage | None, evaluations: _Evaluations) -> StageInfo:
    if row is None:
        return StageInfo(percent=asked.percent, soak_seconds=asked.soak_seconds)
    gate = request_of(rollout).gate
    return StageInfo(
        percent=asked.percent,
        soak_seconds=asked.soak_seconds,
        started=row.started,
        ended=row.ended,
        passed=row.passed,
        candidate=evaluations.show(rollout.version, row.candidate_task, gate),
        baseline=evaluations.show(rollout.baseline, row.baseline_task, gate),
    )
