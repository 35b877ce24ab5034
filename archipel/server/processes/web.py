"""gunicorn's configuration and application. The supervisor passes settings and socket by environment variables."""

from __future__ import annotations

import gc
import logging
import os
import ssl
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from archipel.server.processes import children
from archipel.server.processes.open_files import allow_connections
from archipel.server.processes.parent import end_with_parent
from archipel.server.processes.tls import WebTls
from archipel.server.telemetry import log_lines

if TYPE_CHECKING:
    from collections.abc import Callable

    from flask import Flask

GC_THRESHOLDS = 10_000, 10, 10
"""Requests make little that refers to itself."""

settings = children.settings_from_environment()

bind = [f"fd://{os.environ[children.LISTEN_FD]}"]
wsgi_app = "archipel.server.processes.web:application()"
worker_class = "archipel.server.processes.worker.Worker"
workers = settings.workers
# A download takes a thread for as long as its reader likes. RequestLimits bounds how many there are.
threads = settings.all_threads
# A device keeps its connection between polls. An idle connection takes no thread.
keepalive = 75
worker_connections = allow_connections(settings)
timeout = 120
graceful_timeout = settings.stop_seconds
loglevel = "warning"
control_socket_disable = True


if settings.tls_certificate:
    tls = WebTls(settings)
    certfile, keyfile = str(tls.certificate), str(tls.key)

    def ssl_context(config: Any, default: Callable[[], ssl.SSLContext]) -> ssl.SSLContext:
        """Called for each connection; gunicorn's own would read the files each time."""
        return tls()


def on_starting(server: Any) -> None:
    """Called in gunicorn's own process before anything else."""
    end_with_parent(children.parent())
    # Processes that are forked from this one inherit it.
    log_lines.write_log(settings.log_format, logging.WARNING)
    gunicorn = logging.getLogger("gunicorn.error")
    gunicorn.addFilter(_is_news)
    for handler in gunicorn.handlers:
        handler.setFormatter(log_lines.formatter(settings.log_format))


def _is_news(record: logging.LogRecord) -> bool:
    # A client that is cut off is no error of the server, and anybody could fill the log with such lines.
    return not (record.exc_info and isinstance(record.exc_info[1], BlockingIOError | TimeoutError | ssl.SSLError))


def post_worker_init(worker: Any) -> None:
    """Called in each web process once it can serve: tells the supervisor, which waits for the first one."""
    # What is imported stays. A collection that looks through all of it stops every thread meanwhile.
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    writer = int(os.environ[children.READY_FD])
    # A process that is started later, for one that died, finds the pipe closed or full, because nobody reads it then.
    with suppress(OSError):
        os.set_blocking(writer, False)
        os.write(writer, b"1")


def worker_exit(server: Any, worker: Any) -> None:
    """Called in each web process when it ends, unless it is killed."""
    app = getattr(worker.app, "callable", None)
    if app is not None:
        # Counts of the current minute would be lost with the process.
        services = app.extensions["archipel"]
        services.tally.flush(services.database, services.clock(), whole=True)
        if services.measures is not None:
            services.measures.flush()
        if services.tracer is not None:
            services.tracer.close()


def application() -> Flask:
    """Called in each web process."""
    from archipel.server.app import create_app

    return create_app(settings, measures=children.measures(settings, "web"), draining=children.draining)
