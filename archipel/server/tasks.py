"""Stored tasks: made of a checked request, and what was asked for."""

from __future__ import annotations

from functools import lru_cache

import msgspec

from archipel.server.models import Task
from archipel.server.resources import TaskRequest
from archipel.server.rounds import DEADLINES
from archipel.server.targeting import Target

decode_request = lru_cache(maxsize=256)(msgspec.json.Decoder(TaskRequest).decode)
"""From Task.request."""


def request_of(task: Task) -> TaskRequest:
    """The checked request, as `new_task` stored it."""
    return decode_request(task.request)


def new_task(
    checked: TaskRequest, *, task_id: str, request_digest: str | None, now: float, part: Target | None = None
) -> Task:
    """A running task, as `check_task` gave it. With `part` it takes only so many percent of the devices."""
    return Task(
        task_id=task_id,
        name=checked.name,
        population=checked.population,
        bundle=checked.bundle,
        weights=checked.weights,
        state="running",
        reason="",
        rounds=checked.rounds,
        rounds_committed=0,
        failed_rounds=0,
        request=msgspec.json.encode(checked),
        kind=checked.kind,
        mode=checked.mode,
        privacy=checked.privacy,
        min_cohort=checked.min_cohort,
        cohort=checked.cohort,
        threshold=checked.threshold,
        goal=checked.goal,
        concurrency=checked.concurrency,
        eligibility=checked.eligibility,
        percent=None if part is None else part.percent,
        salt=None if part is None else part.salt,
        max_contributions=checked.max_contributions,
        rest_seconds=checked.rest_seconds,
        request_digest=request_digest,
        hyperparameters=dict(checked.hyperparameters),
        deadlines={**DEADLINES, **checked.deadlines},
        model=None,
        strategy_state=None,
        created=now,
        ended=None,
    )


def audited(task: Task) -> dict[str, str | int | float | None]:
    """What the audit log keeps of a task that is made: whom it asks for what, and how it is protected."""
    names = (
        "name", "population", "kind", "mode", "privacy", "bundle", "weights", "rounds", "min_cohort", "cohort",
        "threshold", "eligibility", "percent", "max_contributions",
    )  # fmt: skip
    return {name: getattr(task, name) for name in names}
