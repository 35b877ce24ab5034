"""When devices are told to come again."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from archipel.protocol.messages import CheckIn, CheckInResponse, LeaveRequest
from archipel.server.app import create_app
from archipel.server.database.tables import CheckInRow
from archipel.server.devices.pace import (
    BUSY_SECONDS,
    LONGEST,
    QUICK_PER_SECOND,
    QUICKEST,
    Pace,
    quick_seconds,
    retry_seconds,
)
from archipel.server.services import Services
from tests.support.devices import POPULATION, Device
from tests.support.world import World


@given(st.integers(0, 10**8), st.floats(0.01, 60), st.floats(0.1, 1e5), st.floats(0, 1, exclude_max=True))
@pytest.mark.sampled(every=4)
def test_bounds(devices: int, shortest: float, per_second: float, draw: float) -> None:
    found = retry_seconds(devices, shortest=shortest, per_second=per_second, draw=draw)
    assert shortest <= found <= max(shortest, 6 * LONGEST)
    if devices <= per_second * shortest:
        assert found == shortest


@pytest.mark.sampled(every=4)
def test_devices_that_came_together_come_apart() -> None:
    """100,000 devices that all come in the first second, at 200 a second: simulated second by second."""
    count, per_second = 100_000, 200.0
    rng = np.random.default_rng(0)
    due = rng.uniform(0, 1, count)
    arrivals = []
    for second in range(3000):
        now = np.flatnonzero(due < second + 1)
        arrivals.append(len(now))
        due[now] += [retry_seconds(count, shortest=1.0, per_second=per_second, draw=d) for d in rng.random(len(now))]
    assert arrivals[0] == count
    later = np.array(arrivals[1:])
    # Poisson from the first second on: mean and variance of the rate asked for, no wave anywhere.
    assert abs(later.mean() / per_second - 1) < 0.02
    assert abs(later.var() / per_second - 1) < 0.15
    assert all(abs(part.mean() / per_second - 1) < 0.1 for part in np.array_split(later, 30))


@pytest.mark.sampled(every=3)
@given(st.integers(0, 10**8), st.floats(0.01, 60), st.floats(0.1, 1e5))
def test_a_small_fleet_asks_often_and_never_too_often_in_total(devices: int, usual: float, per_second: float) -> None:
    quick = quick_seconds(devices, usual, per_second)
    assert min(usual, QUICKEST, usual / 10) <= quick <= usual
    assert quick == usual or devices / quick <= min(QUICK_PER_SECOND, per_second) * (1 + 1e-9)


def test_eight_devices_and_a_hundred() -> None:
    assert [quick_seconds(devices, 2.0, 200.0) for devices in (8, 50, 100, 1000)] == [0.2, 1.0, 2.0, 2.0]
    assert quick_seconds(8, 0.05, 200.0) == 0.05
    assert quick_seconds(8, 30.0, 200.0) == 3.0


@pytest.mark.sampled(every=4)
def test_a_fleet_is_quick_only_while_there_is_work(world: World) -> None:
    devices = world.add_devices(3)
    assert [told(device) for device in devices] == [2.0] * 3
    task = world.create_task(cohort=3, rounds=2)
    world.clock.now += 2
    assert [told(device) for device in devices] == [0.2] * 3
    world.clock.now += BUSY_SECONDS  # nothing began with it
    assert [told(device) for device in devices] == [2.0] * 3
    world.start_round(devices)
    assert told(devices[0]) == 0.2  # the wait after the round
    assert devices[0].status().retry_after == 0.1
    for device in devices:
        assert device.call("POST", f"{device.round}/leave", LeaveRequest())[0] == 200
    world.settle()
    world.clock.now += BUSY_SECONDS / 2
    assert told(devices[0]) == 0.2
    world.operator("POST", f"/v1/tasks/{task['task_id']}/cancel")
    world.clock.now += 2
    assert told(devices[0]) == 2.0


def test_a_buffer_that_nobody_works_for_is_no_work(world: World) -> None:
    world.create_task(
        privacy="plain", mode="asynchronous", threshold=None, cohort=3, concurrency=3, rounds=3,
        deadlines={"updating": 100.0},
    )  # fmt: skip
    devices = world.add_devices(3)
    world.start_round(devices)
    world.clock.now += 65
    (other,) = world.add_devices(1)
    assert told(other) == 0.2  # the first time, too
    world.clock.now += 40  # the seats are over
    assert told(other) == 2.0


def test_another_population_is_left_alone(world: World) -> None:
    world.add_devices(1)
    world.create_task(cohort=3)
    pace = world.app.extensions["archipel"].pace
    assert pace.retry_after(world.clock.now, POPULATION) == 0.2
    assert pace.retry_after(world.clock.now, "teachers") == pace.retry_after(world.clock.now) == 2.0


@pytest.mark.sampled(every=4)
def test_many_that_come_at_once_are_counted_at_once(world: World) -> None:
    """A crowd that was not there when devices were last counted gets quick answers for a second, not for ten."""
    world.create_task(cohort=3)
    devices = world.add_devices(105)
    pace = world.app.extensions["archipel"].pace
    assert pace.retry_after(world.clock.now, POPULATION) == 0.2
    for device in devices:
        told(device)
    world.clock.now += 1
    assert pace.retry_after(world.clock.now, POPULATION) == 2.0


@pytest.fixture
def crowded(world: World) -> World:
    """30 devices where one a second may come."""
    world.app.extensions["archipel"].database.dispose()
    settings = msgspec.structs.replace(world.settings, check_ins_per_second=1.0)
    world.app = create_app(settings, clock=world.clock)
    world.add_devices(30)
    return world


def told(device: Device) -> float:
    return float(device.ask("POST", "/v1/check-ins", CheckInResponse, CheckIn()).retry_after)


@pytest.mark.sampled(every=4)
def test_a_crowd_is_told_to_come_more_rarely(crowded: World) -> None:
    first = [told(device) for device in crowded.devices]
    assert first == [2.0] * 30  # not yet counted
    crowded.clock.now += 11
    second = np.array([told(device) for device in crowded.devices])
    assert 2.0 <= second.min() < second.max() <= 180.0
    assert 10 < second.mean() < 75  # the mean of 30 draws of mean 30 and as much spread
    with crowded.services.database.read() as session:
        for device, wait in zip(crowded.devices, second):
            assert session.get_one(CheckInRow, device.id).due == crowded.clock.now + wait


@pytest.mark.sampled(every=4)
def test_an_outage_does_not_make_the_crowd_forgotten(crowded: World) -> None:
    for device in crowded.devices:
        told(device)
    crowded.clock.now += 1800
    again = Services.open(crowded.settings, clock=crowded.clock)
    pace = Pace(again.database, shortest=1.0, per_second=1.0)
    assert 20 < np.mean([pace.retry_after(crowded.clock.now) for _ in range(1000)]) < 40
    again.database.dispose()


@pytest.mark.sampled(every=4)
def test_only_devices_that_come_soon_are_taken(crowded: World) -> None:
    task = crowded.create_task(cohort=3)
    for device in crowded.devices:
        told(device)
    crowded.clock.now += 13
    for device in crowded.devices[:20]:
        told(device)
    with crowded.services.database.read() as session:
        due = [session.get_one(CheckInRow, device.id).due - crowded.clock.now for device in crowded.devices]
    soon = sum(-10 < seconds <= 10 for seconds in due)
    assert soon < 20  # the ten that did not come again are late by more than ten seconds
    assert crowded.task(task["task_id"])["waiting"] == soon
