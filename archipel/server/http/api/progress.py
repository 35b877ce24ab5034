"""How a task's rounds go, in one answer: for those who watch a task."""

from __future__ import annotations

from archipel.protocol.operator.progress import ProgressQuery, TaskProgress
from archipel.server.http.api.tasks import find_task
from archipel.server.http.routes import OPERATOR, READ, Call, Route
from archipel.server.rounds.progress import task_progress


def show_progress(call: Call[None], task_id: str) -> TaskProgress:
    """How the task's rounds go: which round and how far its devices are, what its sum says, and where the model is."""
    services = call.services
    with services.database.read() as session:
        return task_progress(
            session,
            find_task(session, call.identity, task_id),
            settings=services.settings,
            now=services.clock(),
            operates=call.identity.role in OPERATOR,
            newest=call.query.rounds,
        )


ROUTES = (
    Route("GET", "/v1/tasks/<id:task_id>/progress", READ, show_progress, response=TaskProgress, query=ProgressQuery),
)
