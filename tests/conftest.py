"""Settings for every room: nothing is written outside pytest's own folders, and no property test is timed."""

from __future__ import annotations

import gc
import os
from collections import Counter
from pathlib import Path
from zlib import crc32

import pytest
from hypothesis import Phase, settings

from tests import exporter, url_rules
from tests.commits import in_sample

# Their assertions tell the values too, as those of tests do.
pytest.register_assert_rewrite("tests.support")

# Modules that are imported stay, and there is nothing else yet; it is on again when the tests are collected.
gc.disable()

# PyTorch reads it when it is loaded. Its threads wait for each other in a busy loop: beside other work on the same
# processor, training a small network with two of them takes four times as long as with one.
os.environ.setdefault("OMP_NUM_THREADS", "1")

ALL_UP_TO = int(os.environ.get("ARCHIPEL_ALL_SAMPLED_UP_TO", "0"))
"""Tests of which at least every so manieth is in the short suite are all in it: scripts/mutants.py sets this."""

# Hypothesis fails an example that takes longer than 200 ms, which on a busy machine is any. `@settings(...)` of a test
# begins with this profile, so that none has to say it again; tests/api/test_property_tests.py looks at each.
settings.register_profile("archipel", deadline=None)
# For who only wants to know whether a test fails (scripts/mutants.py): finding a smaller example can take a minute.
settings.register_profile("archipel-short", deadline=None, phases=[Phase.explicit, Phase.generate])
settings.load_profile(os.environ.get("ARCHIPEL_HYPOTHESIS_PROFILE", "archipel"))


@pytest.hookimpl(tryfirst=True)  # before those marked as slow are left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a file's tests marked `sampled(every=n)` all but every n-th are slow, others for each commit.

    Those of one `group` share a long fixture: all of them are in the short suite of every n-th commit.
    """
    places: Counter[Path] = Counter()
    for item in items:
        mark = item.get_closest_marker("sampled")
        if mark is not None:
            every, group = mark.kwargs["every"], mark.kwargs.get("group")
            # Each file begins elsewhere, so that no commit has the first test of every file.
            begin = crc32((group or str(item.path.relative_to(item.config.rootpath))).encode())
            if every > ALL_UP_TO and not in_sample(begin + (0 if group else places[item.path]), every):
                item.add_marker(pytest.mark.slow)
            if not group:
                places[item.path] += 1


def pytest_collection_finish() -> None:
    """What was imported stays: the collector need not walk through it again and again."""
    gc.collect()
    gc.freeze()
    # Graphs are many small objects that refer to each other: with Python's own 700 looking through them takes a
    # quarter of an export from PyTorch.
    gc.set_threshold(10_000, 10, 10)
    gc.enable()


@pytest.fixture(autouse=True)
def _user_folders(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter.remember()
    url_rules.compile_late()
    base: Path = tmp_path_factory.getbasetemp()
    monkeypatch.setenv("XDG_CACHE_HOME", str(base / "user-cache"))
    # A development key that one file's tests make is not that of another file's.
    monkeypatch.setenv("XDG_CONFIG_HOME", str(base / "user-config" / request.module.__name__))
