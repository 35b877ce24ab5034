"""An enrolled device wants the others to wait, or their rounds to fail, and sends nothing wrong.

It leaves every round that takes it, so that one that needs it ends; or it answers as late as it may, each time, so that
deadlines that follow what devices take become longer and longer; or it keeps silent. What stops it: a device that left
rests, for twice as long each time; no single device decides a deadline, and no deadline leaves its bounds.
"""

from __future__ import annotations

from typing import Any

import pytest

from archipel.server.rounds.durations import SHORTEST
from tests.server.rounds.test_leaving import leave
from tests.server.rounds.test_plain_rounds import update
from tests.support.devices import Device
from tests.support.fixtures.server import *  # noqa: F403
from tests.support.world import World


def begin(world: World, **settings: Any) -> str:
    task = world.create_task(
        **{"privacy": "plain", "threshold": None, "cohort": 4, "min_cohort": 3, "rounds": 100, **settings}
    )
    return str(task["task_id"])


def seat(world: World, devices: list[Device]) -> list[Device]:
    """Those that a round takes, once no more of them come."""
    for device in devices:
        device.open_session()
    for _ in range(3):
        for device in devices:
            device.check_in()
        world.settle()
    return [device for device in devices if device.join()]


@pytest.fixture
def devices(world: World) -> list[Device]:
    return world.add_devices(5)


@pytest.mark.sampled(every=8)
def test_a_device_that_leaves_every_round_ends_few(world: World, devices: list[Device]) -> None:
    """Each round needs four of the five devices. In five minutes it ends four, as its rests double."""
    hostile, honest = devices[0], devices[1:]
    task = begin(world, mode="synchronous", min_cohort=4)
    until, ended = world.clock.now + 300, 0
    while world.clock.now < until:
        taken = seat(world, [hostile, *honest])
        if hostile in taken:
            assert leave(hostile)[0] == 200
            ended += 1
        else:
            for device in taken:
                device.updating(**update(0, 1.0))
        world.settle()
        world.clock.now += 20
    shown = world.task(task)
    failed = [each for each in world.rounds(task) if each["phase"] == "failed"]
    assert len(failed) == ended <= 4
    assert shown["state"] == "running"
    assert shown["rounds_committed"] == 15 - ended


@pytest.mark.parametrize("answers", [True, False], ids=["as late as it may", "never"])
@pytest.mark.sampled(every=8)
def test_a_device_that_lets_the_others_wait_does_not_lengthen_it(
    world: World, devices: list[Device], answers: bool
) -> None:
    hostile, honest = devices[0], devices[1:4]
    task = begin(world)
    waited = []
    for _ in range(5):
        taken = seat(world, [hostile, *honest])
        assert hostile in taken
        began, ends = world.clock.now, hostile.status().phase_ends
        for device in honest:
            device.updating(**update(0, 1.0))
        world.settle()
        world.clock.now = ends - 0.1
        if answers:
            hostile.open_session()
            hostile.updating(**update(0, 1.0))
        world.settle()
        world.clock.now = ends
        world.settle()
        waited.append(ends - began)
    assert waited[:3] == [180.0] * 3
    assert waited[3:] == [SHORTEST] * 2
    assert world.task(task)["rounds_committed"] == 5
