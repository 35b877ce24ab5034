"""Check-ins that the server keeps back until the device is in a round."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import msgspec
import pytest

from archipel.protocol.messages import CheckIn, CheckInResponse, LeaveRequest
from archipel.server.app import create_app
from archipel.server.database.fault_tables import Quarantine
from archipel.server.devices.held_check_ins import HeldCheckIns
from archipel.server.http.api.check_ins import AT_ONCE
from tests.support.devices import POPULATION, Device
from tests.support.world import World

LONG = 8.0
"""Seconds that no test waits: what is held so long must be answered before."""


@pytest.fixture
def server_settings() -> Mapping[str, object]:
    return {"held_check_ins": 3, "hold_seconds": LONG}


def ask(device: Device, wait: float = LONG, **more: object) -> tuple[CheckInResponse, float]:
    """The answer, and how long it took."""
    began = time.monotonic()
    request = CheckIn(attributes=device.attributes, wait=wait, **more)  # type: ignore[arg-type]
    answer = device.ask("POST", "/v1/check-ins", CheckInResponse, request)
    return answer, time.monotonic() - began


Answers = Future[tuple[CheckInResponse, float]]


@contextmanager
def held(world: World, *devices: Device) -> Iterator[list[Answers]]:
    """The check-ins of devices that are held meanwhile."""
    there = world.app.extensions["archipel"].held
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(ask, device) for device in devices]
        deadline = time.monotonic() + LONG / 2
        while len(there) < len(devices):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        yield answers


@pytest.mark.sampled(every=3)
def test_an_answer_as_soon_as_the_device_is_in_a_round(world: World) -> None:
    world.create_task(cohort=3)
    devices = world.add_devices(3)
    for device in devices:
        assert device.check_in() is None
    with held(world, *devices) as answers:
        world.settle()
        assigned = time.monotonic()
        plans = [each.result()[0].plan for each in answers]
        assert time.monotonic() - assigned < 2.0  # on a busy machine; a look every quarter of a second
    assert None not in plans
    assert all(device.join() for device in devices)


@pytest.mark.sampled(every=3)
def test_a_new_task_finds_them_too(world: World) -> None:
    devices = world.add_devices(3)
    with held(world, *devices) as answers:
        # Devices that are held wait, at any moment of it.
        world.clock.now += LONG - 0.5
        world.create_task(cohort=3)
        world.settle()
        assert all(each.result()[0].plan is not None for each in answers)


@pytest.mark.sampled(every=3)
def test_nothing_comes(world: World) -> None:
    (device,) = world.add_devices(1)
    answer, seconds = ask(device, 0.5)
    assert (answer.plan, answer.retry_after) == (None, 2.0)  # not held: it is to come in 2 seconds
    assert seconds < 0.4
    world.app = create_app(msgspec.structs.replace(world.settings, retry_after=0.3), clock=world.clock)
    answer, seconds = ask(device, 0.5)
    assert 0.5 <= seconds < 2.0
    assert (answer.plan, answer.retry_after) == (None, AT_ONCE)


@pytest.mark.sampled(every=3)
def test_who_is_not_held(world: World) -> None:
    task = world.create_task(cohort=3, rest_seconds=100.0)
    devices = world.add_devices(4)
    assert ask(devices[0], 0)[1] < LONG / 2
    world.start_round(devices[:3])
    # In a round: there is the plan, or nothing to wait for.
    assert ask(devices[0])[0].plan is not None
    for device in devices[:3]:
        assert device.call("POST", f"{device.round}/leave", LeaveRequest())[0] == 200
    assert ask(devices[0])[0].plan is None
    world.settle()
    # It left a round, and was in one less than `rest_seconds` ago; the fourth was in none.
    for device in devices[:3]:
        answer, seconds = ask(device)
        assert answer.retry_after > AT_ONCE
        assert seconds < LONG / 2
    with held(world, devices[3]):
        world.app.extensions["archipel"].held.close()
    world.operator("POST", f"/v1/tasks/{task['task_id']}/cancel")


def test_who_is_set_aside_is_not_held(world: World) -> None:
    world.create_task(cohort=3)
    devices = world.add_devices(4)
    world.start_round(devices[:3])
    evidence = {"reason": "other", "detail": "x", "round_id": devices[0].round.rsplit("/", 1)[1]}
    with world.services.database.write() as session:
        now = world.clock.now
        who = {"device_id": devices[3].id, "population": POPULATION}
        session.add(Quarantine(**who, **evidence, since=now, until=now + 100, times=1))
    assert devices[3].check_in() is None
    answer, seconds = ask(devices[3])
    assert answer.set_aside is not None
    assert seconds < LONG / 2


@pytest.mark.sampled(every=4)
def test_a_crowd_is_not_held(world: World) -> None:
    settings = msgspec.structs.replace(world.settings, check_ins_per_second=0.1)
    world.app = create_app(settings, clock=world.clock)
    devices = world.add_devices(20)
    for device in devices:
        ask(device, 0)
    world.clock.now += 11
    waits = [ask(device, 1.0) for device in devices[:5]]
    assert all(seconds < 0.9 or answer.retry_after == AT_ONCE for answer, seconds in waits)
    assert max(answer.retry_after for answer, _ in waits) > LONG


def test_no_more_than_there_are_places_for_and_one_of_each_device(world: World) -> None:
    devices = world.add_devices(4)
    with held(world, *devices[:3]) as (first, second, _):
        answer, seconds = ask(devices[3])
        assert answer.retry_after == 2.0
        assert seconds < LONG / 2
        # A device that comes again ends its check-in of before, and takes its place.
        with ThreadPoolExecutor(1) as pool:
            again = pool.submit(ask, devices[0])
            assert first.result()[1] < LONG / 2
            assert len(world.app.extensions["archipel"].held) == 3
            world.app.extensions["archipel"].held.close()
            assert again.result()[0].plan is second.result()[0].plan is None
    # A server that stops holds none.
    assert ask(devices[0])[1] < LONG / 2


@pytest.mark.sampled(every=4)
def test_a_held_check_in_is_no_work(world: World) -> None:
    """It leaves its place to others, and its time is not in the log."""
    kept = HeldCheckIns(world.services.database, most=1, working=1)
    done = threading.Event()

    def serve() -> None:
        with kept.places:
            assert kept.hold("0" * 32, LONG) > 0
        done.set()

    thread = threading.Thread(target=serve)
    thread.start()
    while not len(kept):
        time.sleep(0.01)
    with kept.places:  # the only one
        kept.close()
        assert not done.wait(0.1)
    assert done.wait(LONG)
    thread.join()
    (device,) = world.add_devices(1)
    world.app = create_app(msgspec.structs.replace(world.settings, retry_after=0.1), clock=world.clock)
    _, seconds = ask(device, 1.0)
    assert seconds >= 1.0
    *_, last = world.settings.request_log.read_text().splitlines()
    assert msgspec.json.decode(last)["ms"] < 900
