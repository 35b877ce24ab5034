"""The time of a device that comes again is written by the cheapest statement. A round or a revocation wins."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy import text

from archipel.protocol.messages import CheckIn, CheckInResponse
from archipel.server.database.engine import Database
from archipel.server.database.tables import CheckInRow
from tests.support.devices import Device
from tests.support.world import World


def row(world: World, device: Device) -> CheckInRow:
    with world.services.database.read() as session:
        return session.get_one(CheckInRow, device.id)


@pytest.fixture
def noted(world: World, monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], object]]:
    """What happens between the look at a device's check-in and the note of its time."""
    meanwhile: list[Callable[[], object]] = []
    note = Database.note

    def late(database: Database, statement: object, **values: object) -> None:
        while meanwhile:
            meanwhile.pop()()
        note(database, statement, **values)  # type: ignore[arg-type]

    monkeypatch.setattr(Database, "note", late)
    return meanwhile


def test_a_time_is_written_at_every_second_check_in(world: World) -> None:
    """Each is 3 s after the one before, and the window 10 s: 4 s too early is near enough, 6 s is not."""
    [device] = world.add_devices(1)
    began, seen = world.clock.now, []
    for _ in range(6):
        device.ask("POST", "/v1/check-ins", CheckInResponse, CheckIn())
        found = row(world, device)
        seen.append((found.last_seen - began, found.due - began))
        world.clock.now += 3
    assert seen == [(0, 2), (0, 2), (6, 8), (6, 8), (12, 14), (12, 14)]


@pytest.mark.sampled(every=3)
def test_a_round_that_takes_the_device_meanwhile_keeps_it(world: World, noted: list[Callable[[], object]]) -> None:
    devices = world.add_devices(3)
    for device in devices:
        assert device.check_in() is None
    world.clock.now += 6
    task = world.create_task(min_cohort=3, cohort=3)
    noted.append(world.settle)
    assert devices[0].check_in() is None  # it was looked up before the round began
    [opened] = world.rounds(task["task_id"])
    assert {each["device_id"] for each in opened["participants"]} == {device.id for device in devices}
    found = row(world, devices[0])
    assert (found.due, found.round_id) == (0.0, opened["round_id"])
    assert devices[0].check_in() is not None


def test_a_device_that_is_revoked_meanwhile_is_never_due_again(world: World, noted: list[Callable[[], object]]) -> None:
    [device] = world.add_devices(1)
    device.check_in()
    world.clock.now += 6
    noted.append(lambda: world.operator("POST", f"/v1/devices/{device.id}/revoke"))
    device.check_in()
    assert noted == []
    assert row(world, device).due == 0.0


def test_on_sqlite_only_a_note_may_be_lost_with_the_power(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path}/x.db")
    try:
        with database._noting() as connection:
            assert connection.scalar(text("PRAGMA synchronous")) == 1
        with database._looking() as connection:
            assert connection.scalar(text("PRAGMA synchronous")) == 2
        with database.write() as session:
            assert session.scalar(text("PRAGMA synchronous")) == 2
    finally:
        database.dispose()
