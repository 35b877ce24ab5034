"""What commands print, against text written by hand."""

from __future__ import annotations

import time

import pytest

from archipel.cli.tables import moment, one_line, table


def test_columns_are_as_wide_as_they_must_be() -> None:
    assert table(["id", "state"], [["1", "running"], ["1234", "x"]]) == ["id    state", "1     running", "1234  x"]


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


def test_what_a_server_says_cannot_control_the_terminal() -> None:
    assert one_line("worse by 3 %: ünfit") == "worse by 3 %: ünfit"
    assert one_line("a\x1b[2Jb\nc\rd\u202ee") == "a?[2Jb?c?d?e"
