"""The routes of /v1, by resource."""

from archipel.server.api import bundles, check_ins, enrolment, rounds, server, sessions, tasks, updates
from archipel.server.routes import Route

ROUTES: dict[str, tuple[Route, ...]] = {
    "server": server.ROUTES,
    "enrolment": enrolment.ROUTES,
    "sessions": sessions.ROUTES,
    "check_ins": check_ins.ROUTES,
    "bundles": bundles.ROUTES,
    "rounds": rounds.ROUTES,
    "updates": updates.ROUTES,
    "tasks": tasks.ROUTES,
}

__all__ = ["ROUTES"]
