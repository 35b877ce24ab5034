"""Settings for every room: nothing is written outside pytest's own folders, and no property test is timed."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
from hypothesis import settings

# Hypothesis fails an example that takes longer than 200 ms, which on a busy machine is any. `@settings(...)` of a test
# begins with this profile, so that none has to say it again; tests/api/test_property_tests.py looks at each.
settings.register_profile("archipel", deadline=None)
settings.load_profile("archipel")


def pytest_collection_finish() -> None:
    """What was imported stays: the collector need not walk through it again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _user_folders(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    cache: Path = tmp_path_factory.getbasetemp() / "user-cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
