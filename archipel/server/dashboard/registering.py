"""Puts the dashboard into a web application."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from flask import Flask, Response, request

from archipel.protocol.messages import FieldProblem
from archipel.server.dashboard import entry
from archipel.server.dashboard.desk import Desk, by_name
from archipel.server.dashboard.insight import DOCUMENTS, Documents
from archipel.server.dashboard.live import LIVE, KeptCharts, LivePages, Shown, Viewer, make_shown, read_stamps
from archipel.server.dashboard.pages import ROOT, Page, blueprint, problem_page
from archipel.server.dashboard.session_store import SessionStore
from archipel.server.dashboard.views import (
    audit_log,
    bundles,
    confirm,
    devices,
    insight,
    leaving,
    making,
    models,
    overview,
    rollouts,
    rounds,
    tasks,
)
from archipel.server.http.api import ROUTES
from archipel.server.http.door import Door
from archipel.server.http.problems import problem_response

PAGES: tuple[Page, ...] = tuple(
    page
    for module in (
        overview,
        tasks,
        rounds,
        devices,
        models,
        bundles,
        insight,
        rollouts,
        audit_log,
        making,
        confirm,
        leaving,
    )
    for page in module.PAGES
)
"""Every page that needs a login."""


def register(app: Flask, door: Door) -> None:
    """Serve the dashboard at /dashboard/."""
    sessions, routes = SessionStore(door.services), by_name(ROUTES)
    app.register_blueprint(entry.blueprint(door, sessions))
    app.register_blueprint(blueprint(PAGES, door, routes, sessions))
    services, charts = door.services, KeptCharts()

    app.extensions[DOCUMENTS] = Documents(services.settings.insight_folder)

    def make(task_id: str, viewer: Viewer) -> Shown:
        return make_shown(Desk(services, routes, viewer.identity, "", "", {}, {}, viewer.session), task_id, charts)

    app.extensions[LIVE] = LivePages(
        most=services.settings.live_pages,
        make=make,
        alive=sessions.alive,
        stamps=partial(read_stamps, services.database),
    )


def answer_problem(status: int, message: str, retry_after: int, errors: Sequence[FieldProblem]) -> Response:
    """A page for who opens the dashboard, the API's JSON for everybody else."""
    shown = problem_page if f"{request.path}/".startswith(f"{ROOT}/") else problem_response
    return shown(status, message, retry_after, errors)
