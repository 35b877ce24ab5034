"""Pausing and resuming tasks, and making each only once."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from tests.support.devices import Device
from tests.support.world import World


def finish(world: World, devices: list[Device]) -> None:
    world.run_to("unmasking", devices)
    for device in devices:
        device.unmasking()
    world.settle()


def control(world: World, task: dict[str, Any], what: str) -> tuple[int, Any]:
    return world.operator("POST", f"/v1/tasks/{task['task_id']}/{what}")


@pytest.mark.sampled(every=3)
def test_a_paused_task_finishes_its_round_and_opens_no_other(world: World) -> None:
    task = world.create_task(rounds=2, cohort=3)
    devices = world.add_devices(3)
    world.start_round(devices)
    assert control(world, task, "pause")[1]["state"] == "paused"
    finish(world, devices)
    shown = world.task(task["task_id"])
    assert (shown["state"], shown["rounds_committed"]) == ("paused", 1)
    world.clock.now += 1
    for device in devices:
        assert device.check_in() is None
    world.settle()
    assert len(world.rounds(task["task_id"])) == 1
    assert control(world, task, "resume")[1]["state"] == "running"
    world.start_round(devices)
    finish(world, devices)
    assert world.task(task["task_id"])["state"] == "completed"


@pytest.mark.sampled(every=3)
def test_a_task_whose_last_round_ends_while_it_is_paused_is_complete(world: World) -> None:
    task = world.create_task(cohort=3)
    devices = world.add_devices(3)
    world.start_round(devices)
    control(world, task, "pause")
    finish(world, devices)
    assert world.task(task["task_id"])["state"] == "completed"


@pytest.mark.sampled(every=3)
def test_a_paused_task_can_be_cancelled(world: World) -> None:
    task = world.create_task(cohort=3)
    devices = world.add_devices(3)
    world.start_round(devices)
    control(world, task, "pause")
    assert control(world, task, "cancel")[1]["state"] == "cancelled"
    world.settle()
    assert [each["phase"] for each in world.rounds(task["task_id"])] == ["failed"]
    for what in ("pause", "resume"):
        status, answer = control(world, task, what)
        assert (status, answer["detail"]) == (409, "the task is cancelled")


def test_switching_twice_is_audited_once(world: World) -> None:
    task = world.create_task()
    for what in ("pause", "pause", "resume", "resume"):
        assert control(world, task, what)[0] == 200
    actions = [each["action"] for each in world.operator("GET", "/v1/audit")[1]["items"]]
    assert [each for each in actions if each in ("task.pause", "task.resume")] == ["task.pause", "task.resume"]


@pytest.fixture
def values(world: World) -> dict[str, str | int]:
    return {
        "name": "digits", "population": "pupils", "rounds": 1, "min_cohort": 3, "cohort": 5,
        "bundle": world.publish(),
    }  # fmt: skip


def test_the_same_key_makes_one_task(world: World, values: dict[str, str | int]) -> None:
    key = {"Idempotency-Key": "a" * 24}
    status, first = world.operator("POST", "/v1/tasks", values, key)
    assert status == 201
    assert world.operator("POST", "/v1/tasks", values, key) == (200, first)
    status, answer = world.operator("POST", "/v1/tasks", values | {"rounds": 2}, key)
    assert status == 409, answer
    other = world.operator("POST", "/v1/tasks", values, {"Idempotency-Key": "b" * 24})
    assert other[0] == 201
    assert other[1]["task_id"] != first["task_id"]
    # The key is the caller's own: another's request under it is another task.
    made = world.operator("POST", "/v1/tokens", {"name": "other", "role": "operator"})[1]["token"]
    status, theirs = world.operator("POST", "/v1/tasks", values, {**key, "Authorization": f"Bearer {made}"})
    assert status == 201
    assert theirs["task_id"] != first["task_id"]
    assert len(world.operator("GET", "/v1/tasks")[1]["items"]) == 3


def test_requests_at_the_same_time_make_one_task(world: World, values: dict[str, str | int]) -> None:
    answers = []

    def ask() -> None:
        answers.append(world.operator("POST", "/v1/tasks", values, {"Idempotency-Key": "c" * 24}))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(status for status, _ in answers) == [200] * 7 + [201]
    assert len({answer["task_id"] for _, answer in answers}) == 1


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("key", ["short", "x" * 65, "with blanks in between", "ü" * 20])
def test_a_wrong_key_is_refused(world: World, values: dict[str, str | int], key: str) -> None:
    status, answer = world.operator("POST", "/v1/tasks", values, {"Idempotency-Key": key})
    assert status == 400
    assert "16 to 64" in answer["detail"]
