"""What container platforms and load balancers ask: whether the process lives, and whether to send it requests."""

from __future__ import annotations

from archipel.protocol.operator.tasks import Alive, Ready
from archipel.server.http.problems import refuse
from archipel.server.http.readiness import find_faults
from archipel.server.http.routes import PUBLIC, Call, Route


def alive(call: Call[None]) -> Alive:
    """Whether the process answers; it looks at nothing else, so a restart would mend what is wrong."""
    return Alive(status="alive")


def ready(call: Call[None]) -> Ready:
    """Whether the server can work: database, schema, files, disk, and a coordinator; 503 before it stops."""
    faults = find_faults(call.services)
    if faults:
        raise refuse(503, f"the server is not ready: {'; '.join(faults)}")
    return Ready(status="ready")


ROUTES = (
    Route("GET", "/healthz", PUBLIC, alive, response=Alive),
    Route("GET", "/readyz", PUBLIC, ready, response=Ready),
)
