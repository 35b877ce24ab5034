"""Times as people read them, against the calendar."""

from __future__ import annotations

import time

import pytest

from archipel.protocol.moments import moment


def test_times_are_in_utc(monkeypatch: pytest.MonkeyPatch) -> None:
    """The billionth second since 1970 was 2001-09-09 01:46:40 in UTC, wherever it is read."""
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        assert moment(1_000_000_000.9) == "2001-09-09 01:46:40Z"
    finally:
        monkeypatch.undo()
        time.tzset()
    assert moment(None) == "-"
    assert moment(0.0) == "1970-01-01 00:00:00Z"


def test_what_is_beyond_the_calendar_is_a_number() -> None:
    assert moment(2**62) == "4611686018427387904 (Unix seconds)"
    assert moment(1e300) == "1e+300 (Unix seconds)"
    assert moment(float("nan")) == "nan (Unix seconds)"
