"""The federation server: REST API, coordinator, storage. Imported lazily, so that `archipel --help` stays quick."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from archipel.server.app import create_app as create_app
    from archipel.server.coordinator_process import run_coordinator as run_coordinator
    from archipel.server.operator import OperatorClient as OperatorClient
    from archipel.server.resources import TaskRequest as TaskRequest
    from archipel.server.settings import Settings as Settings
    from archipel.server.settings import init_data_folder as init_data_folder
    from archipel.server.settings import load_settings as load_settings
    from archipel.server.supervisor import supervise as supervise

_HOMES = {
    "OperatorClient": "operator",
    "Settings": "settings",
    "TaskRequest": "resources",
    "create_app": "app",
    "init_data_folder": "settings",
    "load_settings": "settings",
    "run_coordinator": "coordinator_process",
    "supervise": "supervisor",
}
__all__ = [
    "OperatorClient",
    "Settings",
    "TaskRequest",
    "create_app",
    "init_data_folder",
    "load_settings",
    "run_coordinator",
    "supervise",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'archipel.server' has no attribute {name!r}")
    from importlib import import_module

    from archipel.errors import MissingExtraError

    try:
        return getattr(import_module(f"archipel.server.{_HOMES[name]}"), name)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] in ("flask", "sqlalchemy", "alembic", "gunicorn", "werkzeug"):
            raise MissingExtraError(str(error.name), "server") from None
        raise
