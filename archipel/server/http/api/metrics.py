"""The results of a task's rounds, without their participants."""

from __future__ import annotations

import msgspec
from sqlalchemy import select

from archipel.protocol.operator.registry import MetricsPage, RoundMetrics
from archipel.protocol.operator.tasks import PageQuery, RoundResult
from archipel.server.database.tables import Round, Version
from archipel.server.http.api.tasks import find_task
from archipel.server.http.paging import page
from archipel.server.http.routes import READ, Call, Route


def list_metrics(call: Call[None], task_id: str) -> MetricsPage:
    """Results of the task's committed rounds, oldest first: metrics, statistics, or weight sums of training."""
    with call.services.database.read() as session:
        find_task(session, call.identity, task_id)
        rows, after = page(
            session, Round, Round.started, Round.round_id, call.query,
            Round.task_id == task_id, Round.phase == "committed",
        )  # fmt: skip
        made = select(Version.round_id, Version.cohort).where(Version.round_id.in_([row.round_id for row in rows]))
        cohorts = {row.round_id: row.cohort for row in session.execute(made)}
    items = []
    for row in rows:
        result = None if row.result is None else msgspec.convert(row.result, RoundResult)
        items.append(
            RoundMetrics(
                round_id=row.round_id,
                number=row.number,
                devices=cohorts.get(row.round_id, 0) if result is None else result.devices,
                weight_sum=row.weight_sum,
                step_norm=row.step_norm,
                step_scale=row.step_scale,
                weights_out=row.weights_out,
                result=result,
                started=row.started,
                ended=row.ended or row.started,
            )
        )
    return MetricsPage(items=items, next=after)


ROUTES = (Route("GET", "/v1/tasks/<id:task_id>/metrics", READ, list_metrics, response=MetricsPage, query=PageQuery),)
