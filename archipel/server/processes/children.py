"""The environment variables by which the supervisor passes settings and file descriptors to its child processes."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Literal

from archipel.readable import wait_readable
from archipel.server.settings import ENVIRONMENT_PREFIX, Settings, load_settings

if TYPE_CHECKING:
    from archipel.server.telemetry.measures import Measures

FOLDER = "ARCHIPEL_DATA_FOLDER"
PARENT = "ARCHIPEL_PARENT"
LISTEN_FD = "ARCHIPEL_LISTEN_FD"
READY_FD = "ARCHIPEL_READY_FD"
DRAIN_FD = "ARCHIPEL_DRAIN_FD"
"""The reading end of a pipe that ends when the server is about to stop, or the supervisor is gone."""


def child_environment(settings: Settings) -> dict[str, str]:
    """This process's environment, with everything that a child needs to load equal settings."""
    # Variables that override settings are dropped: `settings.environment()` has the result, with the command line's.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(ENVIRONMENT_PREFIX)}
    # glibc would give each of a process's many threads an arena of its own, whose free memory the others cannot use.
    inherited.setdefault("MALLOC_ARENA_MAX", "2")
    return {**inherited, **settings.environment(), FOLDER: settings.folder, PARENT: str(os.getpid())}


def settings_from_environment() -> Settings:
    """Load the settings that the supervisor passed on. Raises ServerError outside of a child process."""
    return load_settings(os.environ.get(FOLDER, "."))


def parent() -> int:
    """Process id of the supervisor."""
    return int(os.environ[PARENT])


def draining() -> bool:
    """Whether the supervisor is about to stop the server. Does not wait."""
    # Nobody writes into the pipe and nobody reads it, so it can be read once its other end is closed.
    return wait_readable(int(os.environ[DRAIN_FD]), 0)


def measures(settings: Settings, kind: Literal["web", "coordinator"]) -> Measures | None:
    """This child's measurements; None where the settings ask for none. Called once. Raises ServerError."""
    if not settings.metrics_port:
        return None
    from archipel.server.telemetry import shared  # here, because most servers measure nothing

    return shared.open_measures(settings, kind)
