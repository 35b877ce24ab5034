"""The code blocks of the README and of docs/, and a shell to run them in."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest


@pytest.fixture
def shell(tmp_path: Path) -> dict[str, str]:
    """The environment of a shell whose commands are those of this Python, with a home of its own."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    # A development key that a page's commands make must not be there for later tests.
    own = {"HOME": tmp_path, "XDG_CACHE_HOME": tmp_path / "cache", "XDG_CONFIG_HOME": tmp_path / "config"}
    return {**os.environ, "PATH": path, **{name: str(folder) for name, folder in own.items()}}
