"""What a task says about its round: what that waits for, and why the last one failed."""

from __future__ import annotations

import time

import msgspec
import pytest

from archipel.operator.tasks import SLOW_SECONDS, Progress
from archipel.protocol.moments import moment
from archipel.protocol.operator.tasks import TaskInfo
from tests.server.rounds.test_leaving import leave
from tests.server.rounds.test_secure_round import give_updates
from tests.support.devices import ANSWERED
from tests.support.world import World


@pytest.mark.sampled(every=4)
def test_a_round_says_who_is_missing(world: World) -> None:
    task = world.create_task(cohort=4, min_cohort=3)["task_id"]
    devices = world.add_devices(4)
    assert world.task(task)["under_way"] == ""
    for device in devices[:3]:
        device.check_in()
    world.settle()
    ends = moment(world.clock.now + 60)
    assert world.task(task)["under_way"] == f"round 1: assigning, 3 of 4 devices wait for it, until {ends}"
    world.start_round(devices)
    ends = moment(world.clock.now + 120)
    devices[0].advertising()
    assert leave(devices[1], "size")[0] == 200
    assert world.task(task)["under_way"] == (
        f"round 1: advertising, 1 of 3 devices have answered, 1 left, until {ends}"
    )
    assert leave(devices[2])[0] == 200
    world.settle()
    shown = world.task(task)
    assert shown["under_way"] == ""
    assert shown["last_failure"] == (
        "round 1: 2 of 4 devices left the round in phase advertising, 3 needed (they said: size 1, untold 1)"
    )
    rested = moment(world.clock.now + world.settings.leave_seconds)
    assert f"2 devices left a round and may be taken again, the first at {rested}; 3 needed" in shown["waiting_for"]
    world.clock.now += 31
    for device in devices:
        device.open_session()
    world.start_round(devices)
    give_updates(devices, [1, 1, 1, 1])
    for phase in ANSWERED:
        for device in devices:
            device.answer(phase)
        world.settle()
    assert world.task(task)["last_failure"] == ""


@pytest.mark.sampled(every=4)
def test_the_task_that_fails_says_what_devices_said(world: World) -> None:
    task = world.create_task(cohort=3, min_cohort=3, deadlines={"assigning": 5})["task_id"]
    devices = world.add_devices(3)
    for _ in range(world.settings.max_failed_rounds):
        world.start_round(devices)
        assert leave(devices[0], "data")[0] == 200
        world.settle()
        world.clock.now += world.settings.leave_seconds
        for device in devices:
            device.open_session()
    shown = world.task(task)
    assert (shown["state"], shown["reason"]) == (
        "failed",
        "5 rounds in a row failed; the last one: 1 of 3 devices left the round in phase advertising, 3 needed "
        "(they said: data 1)",
    )


def test_whoever_watches_is_told_of_a_slow_phase_and_of_no_quick_one(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    task = world.create_task(cohort=3, min_cohort=3)["task_id"]
    devices = world.add_devices(3)
    progress = Progress()

    def seen() -> object:
        return progress(msgspec.convert(world.task(task), TaskInfo))

    world.start_round(devices)
    quick = seen()
    devices[0].advertising()
    now[0] += SLOW_SECONDS - 1
    assert seen() == quick
    now[0] += 1
    slow = seen()
    assert slow != quick
    devices[1].advertising()
    assert seen() == slow
    devices[2].advertising()
    world.settle()
    assert seen() == quick  # another phase, which has only begun
