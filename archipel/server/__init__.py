"""The federation server: REST API, coordinator, storage. Imported on first use, so that `archipel --help` is quick."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from archipel.errors import MissingExtraError

if TYPE_CHECKING:
    from archipel.operator import OperatorClient as OperatorClient
    from archipel.protocol.operator.tasks import TaskRequest as TaskRequest
    from archipel.server.app import create_app as create_app
    from archipel.server.data_folder import init_data_folder as init_data_folder
    from archipel.server.processes.coordinator_process import run_coordinator as run_coordinator
    from archipel.server.processes.supervisor import supervise as supervise
    from archipel.server.retention.by_hand import prune as prune
    from archipel.server.settings import Settings as Settings
    from archipel.server.settings import load_settings as load_settings
    from archipel.server.storage.backup import back_up as back_up
    from archipel.server.storage.backup import restore as restore
    from archipel.server.storage.copying import copy_files as copy_files

_HOMES = {
    "OperatorClient": "archipel.operator",
    "Settings": "archipel.server.settings",
    "TaskRequest": "archipel.protocol.operator.tasks",
    "back_up": "archipel.server.storage.backup",
    "copy_files": "archipel.server.storage.copying",
    "create_app": "archipel.server.app",
    "init_data_folder": "archipel.server.data_folder",
    "load_settings": "archipel.server.settings",
    "prune": "archipel.server.retention.by_hand",
    "restore": "archipel.server.storage.backup",
    "run_coordinator": "archipel.server.processes.coordinator_process",
    "supervise": "archipel.server.processes.supervisor",
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
    "prune",
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
    return getattr(import_module(_HOMES[name]), name)


def _require_extra() -> None:
    # The packages are looked up and not imported: only the supervisor's children need them.
    for package in _EXTRA:
        try:
            installed = find_spec(package) is not None
        except ModuleNotFoundError:
            installed = False
        if not installed:
            raise MissingExtraError(package, "server")
