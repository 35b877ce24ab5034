"""Windows of local time, over midnight and where the clock is set."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone

import pytest

from archipel.client.conditions.probes.device import Hours
from archipel.errors import ClientError


def at(moment: str, *hours: str) -> str:
    """Why not, at this moment of a zone two hours east of Greenwich."""
    zone = timezone(timedelta(hours=2))
    seconds = datetime.fromisoformat(moment).replace(tzinfo=zone).timestamp()
    return Hours(hours, clock=lambda: seconds, timezone=zone).why_not()


def test_from_the_first_minute_to_the_one_before_the_last() -> None:
    assert at("2026-03-01T08:59:59", "09:00-17:30") == "it is 08:59, hours for work are 09:00-17:30 (setting hours)"
    assert at("2026-03-01T09:00:00", "09:00-17:30") == ""
    assert at("2026-03-01T17:29:59.999", "09:00-17:30") == ""
    assert at("2026-03-01T17:30:00", "09:00-17:30")


def test_every_minute_of_a_day_over_midnight_and_in_two_windows() -> None:
    start = datetime(2026, 3, 1, tzinfo=UTC)
    windows = ("22:00-06:00", "12:15-12:45")
    for minute in range(2 * 1440):
        moment = start + timedelta(minutes=minute)
        probe = Hours(windows, clock=moment.timestamp, timezone=UTC)
        expected = moment.hour in {22, 23, 0, 1, 2, 3, 4, 5} or (moment.hour == 12 and 15 <= moment.minute < 45)
        assert (probe.why_not() == "") is expected, moment
        assert probe.value() == moment.isoformat()[11:16]


def test_the_whole_day() -> None:
    for moment in ("00:00", "12:00", "23:59"):
        assert at(f"2026-03-01T{moment}", "00:00-24:00") == ""
    assert at("2026-03-01T23:59", "22:00-24:00") == ""
    assert at("2026-03-01T00:00", "22:00-24:00")


@pytest.fixture
def central_europe(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The device's own time zone: an hour is skipped at 2 on the last Sunday of March, and comes twice in October."""
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "CET-1CEST,M3.5.0,M10.5.0/3")
        time.tzset()
        yield
    time.tzset()


@pytest.mark.usefixtures("central_europe")
@pytest.mark.parametrize(
    ("day", "minutes"),
    [("2026-03-28", 60), ("2026-03-29", 30), ("2026-10-24", 60), ("2026-10-25", 90)],
)
def test_where_the_clock_is_set(day: str, minutes: int) -> None:
    """From 1:30 to 2:30 by the clock on the wall: half an hour, and one and a half, where it is set."""
    start = datetime.fromisoformat(f"{day}T00:00:00+01:00").timestamp() - 3600
    inside = [
        minute
        for minute in range(26 * 60)
        if not Hours(("01:30-02:30",), clock=lambda minute=minute: start + 60 * minute).why_not()
        and time.strftime("%Y-%m-%d", time.localtime(start + 60 * minute)) == day
    ]
    assert len(inside) == minutes


@pytest.mark.parametrize(
    "wrong",
    ["", "22-06", "22:00", "22:00-22:00", "24:00-06:00", "9:00-17:00", "22:60-06:00", "22:00-06:00 ", "22:00–06:00",
     "٢٢:00-06:00", 22, None],
)  # fmt: skip
def test_what_is_no_window(wrong: object) -> None:
    with pytest.raises(ClientError, match=r'hours must be windows such as "22:00-06:00"') as caught:
        Hours(("10:00-11:00", wrong))  # type: ignore[arg-type]
    assert repr(wrong) in str(caught.value)


@pytest.mark.parametrize("wrong", ["22:00-06:00", ()])
def test_what_is_no_list(wrong: object) -> None:
    with pytest.raises(ClientError, match="hours must be a list of windows"):
        Hours(wrong)  # type: ignore[arg-type]
