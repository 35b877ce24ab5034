"""A device that left a round is not taken again at once, and later each time, unless no round can begin without it."""

from __future__ import annotations

from typing import Any

import pytest

from archipel.protocol import messages
from archipel.protocol.moments import moment
from archipel.server.database.fault_tables import Rest
from archipel.server.devices import rests
from archipel.server.rounds import candidates
from tests.server.rounds.test_leaving import leave
from tests.server.rounds.test_plain_rounds import update
from tests.support.devices import Device
from tests.support.world import World


def plain(world: World, **settings: Any) -> dict[str, Any]:
    return world.create_task(**{"privacy": "plain", "threshold": None, "cohort": 3, "min_cohort": 3, **settings})


def taken(world: World, devices: list[Device]) -> set[str]:
    """Whom a round takes of the `devices`, which all check in."""
    for device in devices:
        device.check_in()
    world.settle()
    return {device.id for device in devices if device.join()}


def waits(world: World) -> dict[str, tuple[int, float]]:
    with world.services.database.read() as session:
        return {row.device_id: (row.times, row.until - world.clock.now) for row in session.query(Rest)}


def fail(world: World, devices: list[Device], leaving: Device) -> None:
    assert leaving.id in taken(world, devices)
    assert leave(leaving, "size")[0] == leave(leaving, "size")[0] == 200
    world.settle()


@pytest.mark.sampled(every=3)
def test_the_next_round_takes_others(world: World) -> None:
    task = plain(world)
    devices = world.add_devices(4)
    first = taken(world, devices)
    gone = next(device for device in devices if device.id in first)
    assert leave(gone)[0] == 200
    world.settle()
    assert world.rounds(task["task_id"])[0]["phase"] == "failed"
    assert taken(world, devices) == {device.id for device in devices if device is not gone}


def give(world: World, devices: list[Device]) -> None:
    for index, device in enumerate(devices):
        device.updating(**update(index, 1.0))
    world.settle()


@pytest.mark.sampled(every=6)
def test_each_time_it_rests_twice_as_long(world: World) -> None:
    plain(world, cohort=4, rounds=9)
    devices = world.add_devices(4)
    everybody, others = {device.id for device in devices}, {device.id for device in devices[1:]}
    first = world.settings.leave_seconds
    for times in (1, 2, 3):
        assert taken(world, devices) == everybody
        assert leave(devices[0], "size")[0] == leave(devices[0], "size")[0] == 200
        give(world, devices[1:])
        assert waits(world) == {devices[0].id: (times, first * 2 ** (times - 1))}
        world.clock.now += first * 2 ** (times - 1) - 1
        assert taken(world, devices) == others
        give(world, devices[1:])
        world.clock.now += 1
    # After an update that counts it begins anew.
    assert taken(world, devices) == everybody
    give(world, devices)
    assert waits(world) == {}


@pytest.mark.sampled(every=4)
def test_where_no_round_can_begin_without_it_no_rest_grows(world: World) -> None:
    """What made it leave may be over, and the others would wait for hours otherwise."""
    task = plain(world)
    devices = world.add_devices(3)
    first = world.settings.leave_seconds
    for _ in range(4):
        fail(world, devices, devices[0])
        assert taken(world, devices) == set()
        again = moment(world.clock.now + first)
        assert (
            f"1 device left a round and may be taken again, the first at {again};"
            in (world.task(task["task_id"])["waiting_for"])
        )
        world.clock.now += first - 1
        assert taken(world, devices) == set()
        world.clock.now += 1
    assert taken(world, devices) == {device.id for device in devices}


def four_of_which_one_left_twice(world: World) -> list[Device]:
    plain(world, cohort=4, rounds=9)
    devices = world.add_devices(4)
    for _ in range(2):
        assert taken(world, devices) == {device.id for device in devices}
        assert leave(devices[0])[0] == 200
        give(world, devices[1:])
        world.clock.now += world.settings.leave_seconds
    return devices


@pytest.mark.sampled(every=3)
def test_it_is_needed_only_where_the_others_are_gone_and_not_where_they_are_late(world: World) -> None:
    devices = four_of_which_one_left_twice(world)
    late, seen = devices[:3], world.clock.now - world.settings.leave_seconds
    assert taken(world, late) == set()
    with world.services.database.write() as session:
        session.query(Rest).update({"until": seen + 2 * candidates.LATELY})
    world.clock.now = seen + candidates.LATELY - 1
    assert taken(world, late) == set()
    world.clock.now += 1
    assert taken(world, late) == {device.id for device in late}


@pytest.mark.sampled(every=3)
def test_a_revoked_device_is_no_other_one(world: World) -> None:
    devices = four_of_which_one_left_twice(world)
    assert taken(world, devices[:3]) == set()
    assert world.operator("POST", f"/v1/devices/{devices[3].id}/revoke")[0] == 200
    assert taken(world, devices[:3]) == {device.id for device in devices[:3]}


@pytest.mark.sampled(every=4)
def test_only_rounds_of_the_same_kind_with_the_same_bundle_leave_it_out(world: World) -> None:
    task = plain(world)
    devices = world.add_devices(3)
    fail(world, devices, devices[0])
    world.operator("POST", f"/v1/tasks/{task['task_id']}/cancel")
    same = plain(world)
    assert taken(world, devices) == set()
    world.operator("POST", f"/v1/tasks/{same['task_id']}/cancel")
    plain(world, kind="evaluation", metrics={"loss": 8.0}, rounds=1, min_contributors=3)
    assert taken(world, devices) == {device.id for device in devices}


def test_no_rest_is_longer_than_a_day_and_old_ones_are_forgotten(world: World) -> None:
    plain(world)
    devices = world.add_devices(3)
    fail(world, devices, devices[0])
    with world.services.database.write() as session:
        session.query(Rest).update({"times": 40})
    world.clock.now += 31
    fail(world, devices, devices[0])
    assert waits(world) == {devices[0].id: (41, rests.LONGEST)}
    world.clock.now += rests.LONGEST + rests.FORGOTTEN + 1
    world.coordinator.step()
    assert waits(world) == {}


@pytest.mark.sampled(every=3)
def test_a_rest_does_not_tell_what_the_device_said(world: World) -> None:
    plain(world)
    devices = world.add_devices(3)
    taken(world, devices)
    told: list[messages.LeaveReason | None] = ["size", "privacy", None]
    for device, reason in zip(devices, told, strict=True):
        assert leave(device, reason)[0] == 200
    assert len(set(waits(world).values())) == 1


@pytest.mark.sampled(every=3)
def test_a_round_does_not_wait_for_who_rests(world: World) -> None:
    """Four of a cohort of five take part at once, and not when the assigning phase is over."""
    task = plain(world, cohort=5, rounds=3)
    devices = world.add_devices(5)
    fail(world, devices, devices[0])
    for device in devices[1:]:
        device.updating(**update(0, 1.0))
    world.settle()
    assert world.task(task["task_id"])["rounds_committed"] == 1
    before = world.clock.now
    assert taken(world, devices) == {device.id for device in devices[1:]}
    assert world.clock.now == before
    # Where nobody rests, the whole cohort is waited for.
    for device in devices[1:]:
        device.updating(**update(0, 1.0))
    world.settle()
    world.clock.now += world.settings.leave_seconds
    assert taken(world, devices[:4]) == set()
