"""The federation server: REST API, coordinator, storage. Imported lazily, so that `archipel --help` stays quick."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from archipel.errors import MissingExtraError

if TYPE_CHECKING:
    from archipel.server.app import create_app as create_app
    from archipel.server.backup import back_up as back_up
    from archipel.server.backup import restore as restore
    from archipel.server.coordinator_process import run_coordinator as run_coordinator
    from archipel.server.copying import copy_files as copy_files
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
    "back_up": "backup",
    "copy_files": "copying",
    "create_app": "app",
    "init_data_folder": "settings",
    "load_settings": "settings",
    "restore": "backup",
    "run_coordinator": "coordinator_process",
    "supervise": "supervisor",
}
__all__ = [
    "OperatorClient",
    "Settings",
    "TaskRequest",
    "back_up",
    "copy_files",
    "create_app",
    "init_data_folder",
    "load_settings",
    "restore",
    "run_coordinator",
    "supervise",
]


_EXTRA = ("sqlalchemy", "alembic", "flask", "gunicorn")
_WITHOUT_EXTRA = ("OperatorClient", "TaskRequest", "Settings", "init_data_folder", "load_settings")


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'archipel.server' has no attribute {name!r}")
    if name not in _WITHOUT_EXTRA:
        _require_extra()
    return getattr(import_module(f"archipel.server.{_HOMES[name]}"), name)


def _require_extra() -> None:
    # Looked for, not imported: the supervisor's children load these packages, it does not need to.
    for package in _EXTRA:
        try:
            found = find_spec(package) is not None
        except ModuleNotFoundError:
            found = False
        if not found:
            raise MissingExtraError(package, "server")
