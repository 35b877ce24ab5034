"""Settings for every room: nothing is written outside pytest's own folders."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest


def pytest_collection_finish() -> None:
    """What was imported stays: the collector need not walk through it again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _user_folders(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    cache: Path = tmp_path_factory.getbasetemp() / "user-cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
