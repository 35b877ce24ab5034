"""Deadlines follow what the population's devices take, within bounds that no device can leave."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from archipel.server.rounds.durations import LAST, SHORTEST, STRETCH, allowed, quantile
from tests.server.rounds.test_plain_rounds import update
from tests.support.devices import Device
from tests.support.world import World

SECONDS = st.floats(0, 1000)


@pytest.mark.parametrize(
    ("took", "expected", "needed", "found"),
    [
        ([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], 10, 3, 8),  # 80 %
        ([1, 2, 3, 4, 5, 6, 7, 8], 10, 3, 8),
        ([1, 2, 3, 4, 5, 6, 7], 10, 3, None),  # too many are missing to know
        ([1, 2, 100], 3, 2, 2),  # the slowest alone does not decide
        ([1, 2, 100], 3, 3, 100),  # unless all are needed
        ([5], 1, 1, 5),
        ([], 3, 2, None),
    ],
)
def test_what_a_phase_notes(took: list[float], expected: int, needed: int, found: float | None) -> None:
    assert quantile(took, expected, needed) == found


@pytest.mark.parametrize(
    ("noted", "seconds"),
    [
        ([10.0, 10.0], 120.0),  # not enough rounds
        ([10.0, 10.0, 10.0], 40.0),
        ([10.0, 500.0, 10.0], 40.0),  # one slow round
        ([1.0, 1.0, 1.0], SHORTEST),
        ([100.0, 100.0, 100.0], 400.0),  # slow devices get more than the default
        ([10_000.0] * 3, STRETCH * 120.0),
        ([None, 10.0, 10.0, 10.0], 120.0),  # the newest says nothing
        ([10.0, None, None, None], 120.0),
    ],
)
def test_what_follows(noted: list[float | None], seconds: float) -> None:
    assert allowed(noted, 120.0) == seconds


def test_a_default_below_the_shortest_is_the_shortest() -> None:
    assert allowed([0.1] * 3, 5.0) == 5.0


@pytest.mark.sampled(every=3)
@given(
    honest=st.lists(SECONDS, min_size=4, max_size=20), hostile=st.lists(SECONDS | st.none(), max_size=3),
    default=st.floats(1, 600),
)  # fmt: skip
def test_a_fifth_of_the_devices_cannot_stretch_it(
    honest: list[float], hostile: list[float | None], default: float
) -> None:
    """Neither by answering late nor by not answering: it is what the slowest honest device took, at most."""
    hostile = hostile[: max(len(honest) // 4, 1)]
    took = [*honest, *(each for each in hostile if each is not None)]
    found = quantile(took, len(honest) + len(hostile), 1)
    assert found is not None
    assert found <= max(honest)
    assert min(SHORTEST, default) <= allowed([found] * LAST, default) <= STRETCH * default


@pytest.mark.sampled(every=3)
@given(st.lists(SECONDS | st.none(), max_size=LAST), st.floats(1, 600))
def test_bounds(noted: list[float | None], default: float) -> None:
    assert min(SHORTEST, default) <= allowed(noted, default) <= STRETCH * default
    assert math.isfinite(allowed(noted, default))


def run_round(world: World, devices: list[Device], seconds: list[float]) -> None:
    """A plain round whose devices take so long each; those that are left over never answer."""
    world.start_round(devices)
    began = world.clock.now
    for device, taken in zip(devices, seconds):
        world.clock.now = began + taken
        device.open_session()
        device.updating(**update(0, 1.0))
        world.settle()


def plain(world: World, **settings: Any) -> dict[str, Any]:
    return world.create_task(
        **{"privacy": "plain", "threshold": None, "cohort": 5, "min_cohort": 3, "rounds": 20, **settings}
    )


def waits(world: World, devices: list[Device]) -> float:
    """For how many seconds the next round waits for updates."""
    world.start_round(devices)
    return float(devices[0].status().phase_ends - world.clock.now)


@pytest.mark.sampled(every=4)
def test_rounds_wait_for_a_multiple_of_what_devices_took(world: World) -> None:
    task = plain(world)
    devices = world.add_devices(5)
    for _ in range(3):
        run_round(world, devices, [1, 2, 3, 6, 7])
    assert world.task(task["task_id"])["rounds_committed"] == 3
    assert waits(world, devices) == pytest.approx(4 * 6)
    # A device that is gone holds the others up for so long, and no longer.
    for device in devices[:4]:
        device.updating(**update(0, 1.0))
    world.clock.now += 25
    world.settle()
    assert world.task(task["task_id"])["rounds_committed"] == 4
    assert [round_["deadlines"] for round_ in world.rounds(task["task_id"])] == [{}, {}, {}, {"updating": 24.0}]


@pytest.mark.sampled(every=4)
def test_the_plan_is_valid_until_its_deadlines_are_over(world: World) -> None:
    plain(world)
    devices = world.add_devices(5)
    for _ in range(3):
        run_round(world, devices, [170.0, 170.0, 170.0, 170.0, 170.0])
        for device in devices:
            device.open_session()
    assert waits(world, devices) == pytest.approx(680)
    plan = devices[0].plan
    assert plan is not None
    assert plan.not_after >= world.clock.now + 680


@pytest.mark.sampled(every=4)
def test_a_deadline_that_the_task_gives_is_kept(world: World) -> None:
    plain(world, deadlines={"updating": 100.0})
    devices = world.add_devices(5)
    for _ in range(3):
        run_round(world, devices, [1, 1, 1, 1, 1])
    assert waits(world, devices) == 100.0


@pytest.mark.sampled(every=4)
def test_another_kind_of_task_is_measured_by_itself(world: World) -> None:
    task = plain(world, rounds=3)
    devices = world.add_devices(5)
    for _ in range(3):
        run_round(world, devices, [1, 1, 1, 1, 1])
    assert world.task(task["task_id"])["state"] == "completed"
    again = plain(world, rounds=1)
    assert waits(world, devices) == 15.0
    world.operator("POST", f"/v1/tasks/{again['task_id']}/cancel")
    world.settle()
    plain(world, kind="evaluation", metrics={"loss": 8.0}, rounds=1, min_contributors=3)
    assert waits(world, devices) == 180.0


@pytest.mark.sampled(every=4)
def test_after_a_round_in_which_many_were_missing_the_default_holds(world: World) -> None:
    plain(world)
    devices = world.add_devices(5)
    for _ in range(3):
        run_round(world, devices, [1, 1, 1, 1, 1])
    run_round(world, devices, [1, 1, 1])
    world.clock.now += 16
    world.settle()
    assert waits(world, devices) == 180.0


@pytest.mark.sampled(every=4)
def test_every_phase_of_a_secure_round_is_measured(world: World) -> None:
    task = world.create_task(cohort=3, min_cohort=3, rounds=5)
    devices = world.add_devices(3)
    phases = ("advertising", "sharing", "complaining", "masking", "confirming", "unmasking")
    for _ in range(3):
        world.start_round(devices)
        for number, phase in enumerate(phases):
            world.clock.now += 4 + number
            for device in devices:
                device.answer(phase)
            world.settle()
    world.start_round(devices)
    newest = world.rounds(task["task_id"])[-1]
    # Four times 4 to 9 seconds; deadlines have their own defaults.
    assert newest["deadlines"] == {phase: pytest.approx(4.0 * (4 + n)) for n, phase in enumerate(phases)}
