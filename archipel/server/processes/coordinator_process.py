"""Runs the coordinator as a process of its own: one per data folder, which ends with its supervisor.

Of several coordinators on one database, one works at a time; see archipel.server.processes.lease.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from archipel.errors import ArchipelError
from archipel.server.processes import children
from archipel.server.processes.coordinator import Coordinator
from archipel.server.processes.lease import Lease
from archipel.server.processes.parent import end_with_parent
from archipel.server.processes.stopping import Stop
from archipel.server.services import Services
from archipel.server.settings import Settings
from archipel.server.storage.lock import LOCK_FILE, only_one
from archipel.server.telemetry import log_lines

if TYPE_CHECKING:
    from archipel.server.telemetry.measures import Measures


Beside = Callable[[Services], AbstractContextManager[None]]


def _alone(services: Services) -> AbstractContextManager[None]:
    return nullcontext()


def run_coordinator(
    settings: Settings,
    *,
    stop: Stop | None = None,
    ready: int | None = None,
    measures: Measures | None = None,
    beside: Beside = _alone,
) -> None:
    """Coordinate until `stop` is set or SIGTERM or SIGINT comes.

    Arguments:
        settings: The server's settings.
        stop: Ends the coordinator when it is set.
        ready: A file descriptor that gets one byte, and is closed, once database and storage can be used.
        measures: Where its work is measured; then it also serves the metrics of all of the server's processes.
        beside: What else runs in this process meanwhile: of an edge server, its uplink (archipel.edge).

    Raises:
        ServerError: Another coordinator works on the data folder, or the database or storage cannot be used.

    Example:
        run_coordinator(load_settings("server"))  # until SIGTERM or Ctrl-C
    """
    stop = stop or Stop()
    with stop.on_signals(), only_one(settings.path(LOCK_FILE)) as holder:
        services = Services.open(settings, measures=measures)
        settings.private_key  # noqa: B018 - an unreadable key ends the process now, and not in the first round
        services.prepare()
        lease = Lease(services.database, holder, clock=services.clock, seconds=settings.lease_seconds)
        metrics = nullcontext() if measures is None else _serving(services, lease)
        with metrics, _sinking(services, lease) if settings.mlflow_address else nullcontext():
            if ready is not None:
                os.write(ready, b"1")
                os.close(ready)
            with beside(services):
                Coordinator(services, lease).run(stop)
        if services.tracer is not None:
            services.tracer.close()
        services.database.dispose()


def _sinking(services: Services, lease: Lease) -> AbstractContextManager[None]:
    from archipel.server.processes.mlflow_sink import sinking  # here, because most servers have none

    return sinking(services, lease)


def _serving(services: Services, lease: Lease) -> AbstractContextManager[None]:
    from archipel.server.processes.metrics_server import serving_metrics  # here, because most servers measure nothing

    return serving_metrics(services, lease)


def main(beside: Beside = _alone) -> int:
    """Entry point of the child process that the supervisor starts; `beside` as of `run_coordinator`."""
    logging.getLogger("alembic").setLevel(logging.WARNING)
    try:
        end_with_parent(children.parent())
        settings = children.settings_from_environment()
        log_lines.write_log(settings.log_format, logging.INFO)
        measures = children.measures(settings, "coordinator")
        run_coordinator(settings, ready=int(os.environ[children.READY_FD]), measures=measures, beside=beside)
    except ArchipelError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
