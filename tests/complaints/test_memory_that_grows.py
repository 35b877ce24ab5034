"""'The server eats memory until it is killed.' benchmarks/server_day.py measures a whole day; this is some hours."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_no_object_stays_for_each_check_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from server_day import Day

    day = Day(tmp_path / "data", 12)
    try:
        for _ in range(2):  # caches fill
            day.hour()
        asked, before = day.check_ins, len(gc.get_objects())
        for _ in range(3):
            day.hour()
        asked, after = day.check_ins - asked, len(gc.get_objects())
        assert asked > 1000
        assert day.uploads > 500
        # One object for each would be as many as were asked; two hundred are the noise of caches.
        assert after - before < 200 + asked / 10
    finally:
        day.close()
