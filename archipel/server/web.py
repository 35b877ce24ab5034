"""gunicorn's configuration and application; the supervisor says where by environment."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from archipel.server import children
from archipel.server.parent import end_with_parent

if TYPE_CHECKING:
    from flask import Flask

settings = children.settings_from_environment()

bind = [f"fd://{os.environ[children.LISTEN_FD]}"]
wsgi_app = "archipel.server.web:application()"
worker_class = "gthread"
workers = settings.workers
threads = settings.threads
# A device keeps its connection between polls; an idle one costs no thread.
keepalive = 75
worker_connections = 4000
timeout = 120
graceful_timeout = 5
loglevel = "warning"
control_socket_disable = True


def on_starting(server: Any) -> None:
    """Called in gunicorn's own process before anything else."""
    end_with_parent(children.parent())


def application() -> Flask:
    """Called in each web process."""
    from archipel.server.app import create_app

    return create_app(settings)
