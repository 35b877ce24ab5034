"""Devices that say that they leave a round: the others do not wait for them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from archipel.protocol import messages
from tests.server.rounds.test_plain_rounds import mean, parameters, same, update
from tests.server.rounds.test_secure_round import expected_parameters, give_updates, new_parameters
from tests.support.devices import Device
from tests.support.world import World


def leave(device: Device, reason: messages.LeaveReason | None = None) -> tuple[int, Any]:
    request = messages.LeaveRequest(reason=reason)
    return device.call("POST", f"{device.round}/leave", request)


def shown(world: World, task: dict[str, Any]) -> dict[str, bool]:
    return {each["device_id"]: each["left"] for each in world.rounds(task["task_id"])[-1]["participants"]}


@pytest.mark.sampled(every=4)
def test_the_others_go_on_at_once(world: World) -> None:
    task = world.create_task(cohort=4)
    devices = world.add_devices(4)
    world.start_round(devices)
    began = world.clock.now
    gone, staying = devices[0], devices[1:]
    assert leave(gone)[0] == leave(gone)[0] == 200
    updates = give_updates(staying, [1, 2, 1])
    for phase in ("advertising", "sharing", "complaining", "masking", "confirming", "unmasking"):
        assert staying[0].status().phase == phase
        for device in staying:
            device.answer(phase)
        world.settle()
    assert world.clock.now == began
    assert staying[0].status().phase == "committed"
    w, b = expected_parameters(updates)
    np.testing.assert_array_equal(new_parameters(world, task)["w"], w)
    np.testing.assert_array_equal(new_parameters(world, task)["b"], b)
    assert shown(world, task) == {device.id: device is gone for device in devices}


@pytest.mark.sampled(every=3)
def test_the_last_answer_may_be_that_one_leaves(world: World) -> None:
    world.create_task(cohort=4)
    devices = world.add_devices(4)
    world.start_round(devices)
    for device in devices[1:]:
        device.advertising()
    world.settle()
    assert devices[1].status().phase == "advertising"
    assert leave(devices[0])[0] == 200
    world.settle()
    assert devices[1].status().phase == "sharing"


@pytest.mark.parametrize("settings", [{}, {"mode": "synchronous", "goal": 3}], ids=["semi-synchronous", "goal"])
@pytest.mark.sampled(every=4)
def test_where_too_few_are_left_the_round_ends_at_once(world: World, settings: dict[str, Any]) -> None:
    task = world.create_task(cohort=4, min_cohort=3, **settings)
    devices = world.add_devices(4)
    world.start_round(devices)
    devices[2].advertising()
    assert leave(devices[0])[0] == 200
    world.settle()
    assert devices[2].status().phase == "advertising"
    assert leave(devices[1], "size")[0] == 200
    world.settle()
    [failed] = world.rounds(task["task_id"])
    assert failed["ended"] == world.clock.now
    assert failed["reason"] == "2 of 4 devices left the round in phase advertising, 3 needed"
    assert failed["refused"] == {"size": 1, "untold": 1}
    # What the devices said is for operators, not for the other devices.
    assert "size" not in devices[2].status().reason


@pytest.mark.sampled(every=3)
def test_a_plain_round_ends_at_once_too(world: World) -> None:
    task = world.create_task(privacy="plain", threshold=None, cohort=4, min_cohort=4)
    devices = world.add_devices(4)
    world.start_round(devices)
    devices[1].updating(**update(0, 1.0))
    assert leave(devices[0])[0] == 200
    world.settle()
    [failed] = world.rounds(task["task_id"])
    assert failed["reason"] == "1 of 4 devices left the round in phase updating, 4 needed"


@pytest.mark.parametrize("phase", ["sharing", "complaining", "masking", "confirming", "unmasking"])
@pytest.mark.sampled(every=6)
def test_who_has_sent_something_may_leave_too(world: World, phase: str) -> None:
    """What it has sent counts; the phases after it do not wait for it, and no reason of its own is noted."""
    task = world.create_task(cohort=4, min_cohort=3, threshold=3)
    devices = world.add_devices(4)
    world.start_round(devices)
    updates = give_updates(devices, [1, 2, 1, 3])
    world.run_to(phase, devices)
    began = world.clock.now
    assert leave(devices[0], "other")[0] == 200
    if phase == "sharing":
        status, problem = devices[0].call("PUT", f"{devices[0].round}/shares", messages.Shares(shares=[]))
        assert (status, problem["detail"]) == (410, "this device has left the round")
    order = ("sharing", "complaining", "masking", "confirming", "unmasking")
    for each in order[order.index(phase) :]:
        for device in devices[1:]:
            device.answer(each)
        world.settle()
    assert world.clock.now == began
    assert devices[1].status().phase == "committed"
    counted = updates if phase in ("confirming", "unmasking") else updates[1:]
    w, _ = expected_parameters(counted)
    np.testing.assert_array_equal(new_parameters(world, task)["w"], w)
    assert world.task(task["task_id"])["refused"] == {}


@pytest.mark.sampled(every=3)
def test_too_few_left_in_a_later_phase(world: World) -> None:
    task = world.create_task(cohort=4, min_cohort=3, threshold=3)
    devices = world.add_devices(4)
    world.start_round(devices)
    world.run_to("sharing", devices)
    for device in devices[:2]:
        assert leave(device)[0] == 200
    world.settle()
    [failed] = world.rounds(task["task_id"])
    assert failed["reason"] == "2 of 4 devices left the round in phase sharing, 3 needed"


def test_who_has_answered_and_left_is_not_missing(world: World) -> None:
    world.create_task(cohort=4, min_cohort=4, threshold=4)
    devices = world.add_devices(4)
    world.start_round(devices)
    for device in devices:
        device.advertising()
        if device is devices[0]:
            assert leave(device)[0] == 200
    world.settle()
    # It goes on to the next phase, which knows that it cannot end well.
    assert devices[1].status().reason == "1 of 4 devices left the round in phase sharing, 4 needed"


@pytest.mark.sampled(every=3)
def test_who_has_left_sends_nothing_and_is_given_nothing_more(world: World) -> None:
    world.create_task(cohort=4)
    devices = world.add_devices(4)
    world.start_round(devices)
    assert leave(devices[0])[0] == 200
    body = devices[0].participant.advertise()
    status, problem = devices[0].call("PUT", f"{devices[0].round}/advertisement", body)
    assert (status, problem["detail"]) == (410, "this device has left the round")
    assert devices[0].check_in() is None
    assert devices[1].check_in() is not None


@pytest.mark.sampled(every=4)
def test_who_is_not_in_the_round(world: World) -> None:
    world.create_task(cohort=4)
    *devices, stranger = world.add_devices(5)
    world.start_round(devices)
    stranger.plan = devices[0].plan
    assert leave(stranger)[0] == 403
    assert stranger.call("POST", f"/v1/rounds/{'0' * 32}/leave", messages.LeaveRequest())[0] == 404
    assert world.operator("POST", f"{devices[0].round}/leave", {})[0] == 403


@pytest.mark.sampled(every=4)
def test_a_plain_round(world: World) -> None:
    task = world.create_task(privacy="plain", threshold=None, cohort=4)
    devices = world.add_devices(4)
    world.start_round(devices)
    assert leave(devices[3])[0] == 200
    updates = [update(index, 1.0 + index) for index in range(3)]
    for device, values in zip(devices, updates):
        device.updating(**values)
    world.settle()
    assert world.task(task["task_id"])["rounds_committed"] == 1
    same(parameters(world, task), mean(updates))
    assert devices[3].try_upload(b"late")[0] == 410


@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.sampled(every=4)
def test_a_buffered_round_waits_for_nobody(world: World, ended: bool) -> None:
    """There a seat is given back when its time is over: else it would be given to the same device again and again."""
    world.create_task(privacy="plain", mode="asynchronous", threshold=None, cohort=3, concurrency=6, rounds=3)
    devices = world.add_devices(6)
    world.start_round(devices)
    if ended:
        for device in devices[1:4]:
            device.updating(**update(0, 1.0))
        world.settle()
    assert leave(devices[0])[0] == 200
    assert devices[0].join()
    devices[0].updating(**update(1, 1.0))


@pytest.mark.sampled(every=3)
def test_refusals_are_counted_by_reason_and_of_no_device(world: World) -> None:
    """Once for each device, however often it says so; who said what is nowhere."""
    task = world.create_task(cohort=6, min_cohort=3, threshold=4)
    devices = world.add_devices(6)
    world.start_round(devices)
    told: list[messages.LeaveReason | None] = ["cohort", "cohort", None]
    for device, reason in zip(devices, told):
        assert leave(device, reason)[0] == leave(device, "size")[0] == 200
    expected = {"cohort": 2, "untold": 1}
    assert world.task(task["task_id"])["refused"] == expected
    [info] = world.rounds(task["task_id"])
    assert info["refused"] == expected
    assert {name for each in info["participants"] for name in each} == {
        "device_id", "furthest", "left", "bytes_uploaded",
    }  # fmt: skip


@pytest.mark.sampled(every=3)
def test_a_buffered_round_counts_them_too(world: World) -> None:
    task = world.create_task(privacy="plain", mode="asynchronous", threshold=None, cohort=3, concurrency=6, rounds=3)
    devices = world.add_devices(6)
    world.start_round(devices)
    for _ in range(2):
        assert leave(devices[0], "privacy")[0] == 200
    assert world.task(task["task_id"])["refused"] == {"privacy": 1}


@pytest.mark.parametrize("body", [b'{"reason":"I am ill"}', b'{"reason":7}', b'{"why":"cohort"}', b"", b"[]"])
@pytest.mark.sampled(every=6)
def test_a_reason_is_one_of_the_list(world: World, body: bytes) -> None:
    task = world.create_task(cohort=4)
    devices = world.add_devices(4)
    world.start_round(devices)
    assert devices[0].call("POST", f"{devices[0].round}/leave", body)[0] == 400
    assert world.task(task["task_id"])["refused"] == {}
    assert leave(devices[0], "other")[0] == 200
