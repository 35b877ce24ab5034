"""What the page of a task shows of its rounds, and the stream that keeps it up to date."""

from __future__ import annotations

import hashlib
import re
import socket
from collections.abc import Iterator
from typing import Any

import msgspec
from flask import Response, current_app, request

from archipel.protocol.operator.progress import DONE, RoundProgress, TaskProgress
from archipel.server.dashboard import rendering
from archipel.server.dashboard.desk import Desk
from archipel.server.dashboard.live.hub import LivePages, Shown, Viewer
from archipel.server.http.routes import OPERATOR
from archipel.server.http.sending import in_time

LIVE = "archipel.live"
"""The name of an application's LivePages among its extensions."""
ROUNDS = 10
"""Of so many rounds that have ended the page tells."""
_VERSION = re.compile("[0-9a-f]{16}")


def show_rounds(desk: Desk, task_id: str) -> dict[str, Any]:
    """What the templates of a task's rounds need. Raises RefusalError as the API refuses it."""
    progress = desk.ask("show_progress", query={"rounds": ROUNDS}, task_id=task_id)
    told = [*progress.running, *progress.newest]
    return {
        "progress": progress,
        "done": DONE,
        "version": version_of(progress),
        "current": told[0] if told else None,
        "summed": next((each for each in told if each.metrics or each.distributions), None),
        "failed": [each for each in told if each.missing or each.faults or each.set_aside][:3],
    }


def version_of(progress: TaskProgress) -> str:
    """16 hexadecimal digits that are others when something has happened, and not when only time has passed."""
    still = msgspec.structs.replace(progress, now=0.0, running=[_without_time(each) for each in progress.running])
    return hashlib.sha256(msgspec.json.encode(still)).hexdigest()[:16]


def _without_time(each: RoundProgress) -> RoundProgress:
    phases = [msgspec.structs.replace(phase, seconds=None) for phase in each.phases]
    return msgspec.structs.replace(each, seconds=0.0, phases=phases)


def make_shown(desk: Desk, task_id: str) -> Shown:
    """The HTML that an event carries, of which each element takes the place of that with the same id."""
    values = show_rounds(desk, task_id)
    progress: TaskProgress = values["progress"]
    html = rendering.render("live_event.html", desk, **values)
    evaluated = any(each.evaluation_state in ("running", "proposed") for each in progress.newest)
    return Shown(values["version"], html, lively=progress.ended is None or evaluated)


def open_stream(desk: Desk, task_id: str) -> Response:
    """The stream of a task's events for whoever asks for it."""
    live: LivePages = current_app.extensions[LIVE]
    # Also where others watch the same and nothing is made for this viewer, they must be allowed to.
    desk.ask("show_progress", query={"rounds": 0}, task_id=task_id)
    # All who may operate see the same of a task, and all others do.
    viewer = Viewer(desk.identity, desk.session, "operator" if desk.identity.role in OPERATOR else "other")
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
