"""The routes of /v1, by resource."""

from archipel.server.http.api import (
    access,
    audit_log,
    bundles,
    check_ins,
    description,
    devices,
    enrolment,
    enrolment_tokens,
    metrics,
    neighbours,
    participants,
    populations,
    probes,
    progress,
    rollouts,
    rotations,
    round_log,
    rounds,
    server,
    sessions,
    tasks,
    updates,
    weights_log,
)
from archipel.server.http.api import registry as models
from archipel.server.http.routes import Route

RESOURCES: dict[str, tuple[Route, ...]] = {
    "server": server.ROUTES,
    "probes": probes.ROUTES,
    "enrolment": enrolment.ROUTES,
    "rotations": rotations.ROUTES,
    "enrolment_tokens": enrolment_tokens.ROUTES,
    "devices": devices.ROUTES,
    "populations": populations.ROUTES,
    "sessions": sessions.ROUTES,
    "check_ins": check_ins.ROUTES,
    "bundles": bundles.ROUTES,
    "weights_log": weights_log.ROUTES,
    "rounds": rounds.ROUTES,
    "rounds over neighbours": neighbours.ROUTES,
    "updates": updates.ROUTES,
    "tasks": tasks.ROUTES,
    "participants": participants.ROUTES,
    "metrics": metrics.ROUTES,
    "progress": progress.ROUTES,
    "round_log": round_log.ROUTES,
    "models": models.ROUTES,
    "rollouts": rollouts.ROUTES,
    "tokens": access.ROUTES,
    "audit": audit_log.ROUTES,
}
ROUTES: dict[str, tuple[Route, ...]] = {**RESOURCES, "description": description.routes(RESOURCES)}

__all__ = ["RESOURCES", "ROUTES"]
