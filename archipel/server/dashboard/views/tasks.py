"""The list of tasks, and one task: its state, rounds, curves, privacy and settings."""

from __future__ import annotations

from typing import Any

import msgspec
from flask import Response

from archipel.server.dashboard import rendering
from archipel.server.dashboard.desk import Desk
from archipel.server.dashboard.live import open_stream, show_results, show_rounds
from archipel.server.dashboard.pages import ROOT, Page
from archipel.server.dashboard.views.confirm import told

STATES = ("proposed", "running", "paused", "completed", "cancelled", "failed")
KINDS = ("training", "evaluation", "analytics")
FILTERS = ("population", "state", "kind", "after")
_ELSEWHERE = {
    "task_id", "name", "state", "reason", "population", "kind", "rounds", "rounds_committed", "waiting", "waiting_for",
    "under_way", "last_failure", "search", "refused", "privacy_spent", "hints", "created", "ended", "created_by",
    "approved_by", "model", "failed_rounds", "spoiled_rounds", "weights_deleted", "evaluates",
}  # fmt: skip
"""Fields of a task that its page shows in other places than the table of settings."""


def list_tasks(desk: Desk) -> str:
    """Tasks, newest first, of a population, state and kind."""
    asked = {name: desk.query.get(name, "") for name in FILTERS}
    page = desk.ask("list_tasks", query={**asked, "limit": "25"})
    names = [each.name for each in desk.ask("list_populations", query={"limit": 500}).items]
    return rendering.render(
        "tasks.html", desk, page=page, asked=asked, states=STATES, kinds=KINDS, populations=names,
        creates=desk.may("create_task"),
    )  # fmt: skip


def show_task(desk: Desk, task_id: str) -> str:
    """One task."""
    # The rounds first: what happens after them is sent as news.
    rounds, results = show_rounds(desk, task_id), show_results(desk, task_id)
    return rendering.render(
        "task.html", desk, **rounds, **results, settings=show_settings(results["task"]), told=told(desk, "task")
    )


def watch_task(desk: Desk, task_id: str) -> Response:
    """What happens in a task's rounds, as a stream of events."""
    return open_stream(desk, task_id)


def show_settings(task: Any) -> list[tuple[str, str]]:
    """The fields of a task that are settings, as pairs of name and value for people."""
    shown = []
    for name in task.__struct_fields__:
        value = getattr(task, name)
        if name in _ELSEWHERE or value in (None, "", {}, []):
            continue
        built = msgspec.to_builtins(value)
        # Noise, and a rule, that there is none of.
        if isinstance(built, dict) and (built.get("mechanism") == "none" or built.get("rule") == "mean"):
            continue
        text = rendering.write_words(built) if isinstance(built, dict) else rendering.write_value(built)
        shown.append((name.replace("_", " "), text))
    return shown


PAGES = (
    Page("GET", f"{ROOT}/tasks", list_tasks, ("list_tasks", "list_populations")),
    Page("GET", f"{ROOT}/tasks/<id:task_id>", show_task, ("show_task", "show_progress", "list_metrics")),
    Page("GET", f"{ROOT}/tasks/<id:task_id>/events", watch_task, ("show_progress",), streams=True),
)
