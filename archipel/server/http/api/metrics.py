"""The results of a task's rounds, without their participants."""

from __future__ import annotations

import msgspec
from sqlalchemy import or_, select

from archipel.protocol.metrics.training_metrics import UPDATE_CLIP
from archipel.protocol.operator.registry import MetricsPage, RoundMetrics
from archipel.protocol.operator.results import RoundResult
from archipel.protocol.operator.tasks import ResultQuery
from archipel.server.database.tables import Round, Task, Version
from archipel.server.database.task_requests import read_plan
from archipel.server.http.api.tasks import find_task
from archipel.server.http.paging import page
from archipel.server.http.routes import READ, Call, Route
from archipel.server.rounds.progress import means_by_name, spread_by_name
from archipel.server.storage.blob_rows import deleted_weights


def list_metrics(call: Call[None], task_id: str) -> MetricsPage:
    """Results of the task's committed rounds, oldest first: metrics, statistics, and weight sums of training."""
    with call.services.database.read() as session:
        task = find_task(session, call.identity, task_id)
        rows, after = page(
            session, Round, Round.started, Round.round_id, call.query,
            Round.task_id == task_id, Round.phase == "committed",
            # One row for each version, though its round had several groups.
            or_(Round.part_of.is_(None), Round.weights_out.is_not(None)),
            newest_first=call.query.newest_first,
        )  # fmt: skip
        ids = [row.round_id for row in rows]
        made = select(Version.round_id, Version.cohort).where(Version.round_id.in_(ids))
        cohorts = {row.round_id: row.cohort for row in session.execute(made)}
        evaluations = {each.evaluates: each for each in session.scalars(select(Task).where(Task.evaluates.in_(ids)))}
        deleted = deleted_weights(session, [row.weights_out for row in rows])
        of_evaluations = select(Round.task_id, Round.result).where(
            Round.task_id.in_([each.task_id for each in evaluations.values()]), Round.phase == "committed"
        )
        found = {row.task_id: msgspec.convert(row.result, RoundResult) for row in session.execute(of_evaluations)}
    items = []
    for row in rows:
        result = None if row.result is None else msgspec.convert(row.result, RoundResult)
        evaluation = evaluations.get(row.round_id)
        evaluated = None if evaluation is None else found.get(evaluation.task_id)
        items.append(
            RoundMetrics(
                round_id=row.round_id,
                number=row.number,
                devices=cohorts.get(row.round_id, 0) if result is None else result.devices,
                weight_sum=row.weight_sum,
                step_norm=row.step_norm,
                step_scale=row.step_scale,
                clip=read_plan(row).hyperparameters.get(UPDATE_CLIP),
                weights_out=row.weights_out,
                weights_deleted=deleted.get(row.weights_out or "", (None, ""))[0],
                result=result,
                metrics=means_by_name(task.kind, result) | means_by_name("evaluation", evaluated),
                distributions=spread_by_name(result) | spread_by_name(evaluated),
                evaluation=None if evaluation is None else evaluation.task_id,
                evaluation_state=None if evaluation is None else evaluation.state,  # type: ignore[arg-type]
                started=row.started,
                ended=row.ended or row.started,
            )
        )
    return MetricsPage(items=items, next=after)


ROUTES = (Route("GET", "/v1/tasks/<id:task_id>/metrics", READ, list_metrics, response=MetricsPage, query=ResultQuery),)
