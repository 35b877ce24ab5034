"""What the page of a task shows of its rounds, and the stream that keeps it up to date."""

from __future__ import annotations

import hashlib
import re
import socket
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from flask import Response, current_app, request

from archipel.protocol.operator.progress import DONE, RoundProgress, TaskProgress
from archipel.server.dashboard import rendering
from archipel.server.dashboard.actions import offered
from archipel.server.dashboard.charts import curves_of, deciles_of
from archipel.server.dashboard.desk import Desk
from archipel.server.dashboard.live.hub import LivePages, Shown, Viewer
from archipel.server.http.sending import in_time

LIVE = "archipel.live"
"""The name of an application's LivePages among its extensions."""
ROUNDS = 10
"""Of so many rounds that have ended the page tells."""
POINTS = 500
"""Rounds in a chart: the newest."""
MODELS = 3
"""So many models are offered on the page of a training that has ended."""
KEPT = 64
"""Of so many tasks what rounds have found is kept as it is shown, until a round ends."""
_VERSION = re.compile(r"[0-9a-f]{16}\.[0-9a-f]{16}")


def show_rounds(desk: Desk, task_id: str) -> dict[str, Any]:
    """What the templates of a task's rounds need. Raises RefusalError as the API refuses it."""
    progress = desk.ask("show_progress", query={"rounds": ROUNDS}, task_id=task_id)
    told = [*progress.running, *progress.newest]
    failed = [each for each in told if each.missing or each.faults or each.set_aside][:3]
    return {
        "progress": progress,
        "done": DONE,
        "version": f"{version_of(progress)}.{results_version(progress)}",
        "actions": offered(desk, "task", progress),
        "current": told[0] if told else None,
        "summed": next((each for each in told if each.metrics or each.distributions), None),
        "failed": failed,
        # With an eligibility devices go by names that hold for one round alone, and have no page by these.
        "named": bool(failed) and desk.may("show_device") and not desk.ask("show_task", task_id=task_id).eligibility,
    }


def version_of(progress: TaskProgress) -> str:
    """16 hexadecimal digits that are others when something has happened, and not when only time has passed."""
    still = msgspec.structs.replace(progress, now=0.0, running=[_without_time(each) for each in progress.running])
    return hashlib.sha256(msgspec.json.encode(still)).hexdigest()[:16]


def show_results(desk: Desk, task_id: str) -> dict[str, Any]:
    """What the templates of a task's curves, and of what it can be used for, need. Raises RefusalError as the API
    refuses it."""
    metrics = desk.ask("list_metrics", query={"limit": POINTS, "newest_first": True}, task_id=task_id)
    results = sorted(metrics.items, key=lambda each: (each.started, each.number))
    task = desk.ask("show_task", task_id=task_id)
    models = _models_for(desk, task)
    known = _registered(desk, task) if models else set()
    return {
        "task": task,
        "becomes": [name for name in models if name not in known][:MODELS],
        "makes_model": models == [] and desk.may("create_model") and _has_learned(task),
        "results": results,
        "cut": metrics.next is not None,
        "curves": curves_of(results),
        "deciles": deciles_of(results),
    }


def _has_learned(task: Any) -> bool:
    return task.kind == "training" and task.ended is not None and task.rounds_committed > 0 and task.model is not None


def _registered(desk: Desk, task: Any) -> set[str]:
    """Names of the models of which what the task has learned is a version already."""
    place = desk.ask("show_progress", query={"rounds": 0}, task_id=task.task_id).model
    return set() if place is None else {each.model for each in place.registered}


def _models_for(desk: Desk, task: Any) -> list[str]:
    """Names of the models of the task's population, of which what it has learned may be registered as a version."""
    if not _has_learned(task) or not desk.may("list_models", "register_version"):
        return []
    page = desk.ask("list_models", query={"limit": 100})
    return [each.name for each in page.items if each.population == task.population]


def results_version(progress: TaskProgress) -> str:
    """16 hexadecimal digits that are others when a round or the task has ended, or what a round made was evaluated."""
    results = [(each.round_id, each.outcome, each.metrics, each.distributions) for each in progress.newest]
    still = (progress.rounds_committed, progress.ended, results)
    return hashlib.sha256(msgspec.json.encode(still)).hexdigest()[:16]


class KeptCharts:
    """The HTML of the charts of the tasks that were watched last, so that it is made once for each result."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: OrderedDict[tuple[str, str], tuple[str, str]] = OrderedDict()

    def of(self, task_id: str, sees: str, version: str, make: Callable[[], str]) -> str:
        """The charts of a task as those see them who see the same; `make` makes those of another version."""
        with self._lock:
            kept = self._made.get((task_id, sees))
        if kept is not None and kept[0] == version:
            return kept[1]
        html = make()
        with self._lock:
            self._made[task_id, sees] = (version, html)
            self._made.move_to_end((task_id, sees))
            while len(self._made) > KEPT:
                self._made.popitem(last=False)
        return html


def _without_time(each: RoundProgress) -> RoundProgress:
    phases = [msgspec.structs.replace(phase, seconds=None) for phase in each.phases]
    return msgspec.structs.replace(each, seconds=0.0, phases=phases)


def make_shown(desk: Desk, task_id: str, kept: KeptCharts) -> Shown:
    """The HTML that an event carries, of which each element takes the place of that with the same id."""
    values = show_rounds(desk, task_id)
    progress: TaskProgress = values["progress"]
    rounds, results = values["version"].split(".")

    def draw() -> str:
        return rendering.render("live_result_event.html", desk, **show_results(desk, task_id))

    parts = (
        (rounds, rendering.render("live_event.html", desk, **values)),
        (results, kept.of(task_id, _sees(desk), results, draw)),
    )
    evaluated = any(each.evaluation_state in ("running", "proposed") for each in progress.newest)
    return Shown(parts, lively=progress.ended is None or evaluated)


def _sees(desk: Desk) -> str:
    """All of one role see the same of a task, and may do the same with it."""
    return desk.identity.role


def open_stream(desk: Desk, task_id: str) -> Response:
    """The stream of a task's events for whoever asks for it."""
    live: LivePages = current_app.extensions[LIVE]
    # Also where others watch the same and nothing is made for this viewer, they must be allowed to.
    desk.ask("show_progress", query={"rounds": 0}, task_id=task_id)
    viewer = Viewer(desk.identity, desk.session, _sees(desk))
    seen = request.headers.get("Last-Event-ID") or desk.query.get("after", "")
    connection: socket.socket | None = request.environ.get("gunicorn.socket")
    parts: Iterator[bytes] = live.open(
        task_id,
        viewer,
        seen=seen if _VERSION.fullmatch(seen) else "",
        descriptor=None if connection is None else connection.fileno(),
    )
    response = Response(in_time(parts, desk.services.settings.stall_seconds), mimetype="text/event-stream")
    response.call_on_close(parts.close)  # type: ignore[attr-defined]
    # Proxies would otherwise collect events until there are enough of them.
    response.headers["X-Accel-Buffering"] = "no"
    return response
