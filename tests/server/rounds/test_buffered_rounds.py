"""Asynchronous tasks: with privacy plain a buffer that any device fills, with privacy secure overlapping groups."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import numpy as np
import pytest

from tests.server.rounds.test_plain_rounds import Update, mean, parameters, same, update
from tests.server.rounds.test_secure_round import expected_parameters, give_updates, new_parameters
from tests.support.devices import Device
from tests.support.tiny_bundle import make_bundle
from tests.support.world import World

P = ParamSpec("P")
R = TypeVar("R")


def asynchronous(world: World, **settings: Any) -> dict[str, Any]:
    return world.create_task(
        **{
            "privacy": "plain", "mode": "asynchronous", "threshold": None, "cohort": 3, "concurrency": 6, "rounds": 3,
            **settings,
        }
    )  # fmt: skip


def seats(world: World, devices: list[Device]) -> list[Device]:
    """Check in, let the coordinator work, and return those that have a plan now."""
    for device in devices:
        device.check_in()
    world.settle()
    return [device for device in devices if device.join()]


@pytest.mark.sampled(every=3)
def test_late_updates_come_into_a_later_version_and_count_less(world: World) -> None:
    task = asynchronous(world, staleness_exponent=0.5)
    devices = world.add_devices(6)
    assert seats(world, devices) == devices
    updates = [update(index, 1.0 + index) for index in range(6)]
    for device, values in zip(devices[:3], updates[:3]):
        device.updating(**values)
    world.clock.now += 1
    world.settle()
    assert world.task(task["task_id"])["rounds_committed"] == 1
    first = parameters(world, task)
    same(first, mean(updates[:3]))

    # Those that were slower still have their seats; the three that answered wait, and get new ones.
    assert seats(world, devices[:3]) == devices[:3]
    assert [device.plan.number for device in devices] == [2, 2, 2, 1, 1, 1]
    fresh = update(6)
    devices[0].updating(**fresh)
    for device, values in zip(devices[3:5], updates[3:5]):
        device.updating(**values)
    world.clock.now += 1
    world.settle()
    assert world.task(task["task_id"])["rounds_committed"] == 2
    # Nguyen et al. 2022: s(tau) = 1 / sqrt(1 + tau), tau = 1 for the two late ones.
    moved = mean([fresh, *updates[3:5]], [1.0, 2**-0.5, 2**-0.5])
    same(parameters(world, task), {name: first[name].astype(np.float64) + moved[name] for name in moved})
    shown = world.rounds(task["task_id"])
    assert [row["number"] for row in shown] == [1, 2, 3]


@pytest.mark.sampled(every=3)
def test_a_stale_model_is_mixed_in_where_the_strategy_is_fedasync(world: World, tmp_path: Path) -> None:
    """Xie et al. 2019: (1 - a s) w + a s w_k of each device's own model w_k, which it made of an earlier version."""
    policy = {"modes": ("plain",), "max_value": 100.0}
    file = make_bundle(tmp_path, world.keys.publisher, name="mixed", strategy="fedasync", min_cohort=1, policy=policy)
    bundle = world.operator("POST", "/v1/bundles", file.read_bytes())[1]["digest"]
    rates = {"server_lr": 0.5, "hinge_slope": 1.0, "hinge_delay": 1.0}
    settings = {"bundle": bundle, "cohort": 1, "min_cohort": 1, "concurrency": 3, "hyperparameters": rates}
    request = {"name": "m", "population": "pupils", "rounds": 1, "privacy": "plain", "mode": "asynchronous", **settings}
    secure = {"privacy": "secure", "min_cohort": 2, "cohort": 2}
    for wrong, why in (({"cohort": 2}, "cohort: 2"), ({"mode": "synchronous"}, "mode: s"), (secure, "privacy: secure")):
        status, answer = world.operator("POST", "/v1/tasks", {**request, **wrong})
        assert status == 422
        assert f"not possible: {why}" in answer["detail"]
        assert "mixes in each update by itself" in answer["detail"]
    task = asynchronous(world, **settings, staleness_exponent=0.5)
    devices = world.add_devices(3)
    assert seats(world, devices) == devices
    versions: list[Update] = [{"w": np.zeros((3, 2)), "b": np.zeros(2)}]
    # All three begin with the first version, so that they are 0, 1 and 2 versions behind.
    for stale, device in enumerate(devices):
        values = update(stale, 2.0)
        device.updating(**values)
        world.clock.now += 1
        world.settle()
        discount = (1 + stale) ** -0.5 / (1 + max(stale - 1, 0))
        made = {name: versions[0][name] + values[f"{name}.update"].astype(np.float64) / 2 for name in ("w", "b")}
        versions.append({n: (1 - 0.5 * discount) * versions[-1][n] + 0.5 * discount * made[n] for n in made})
        same(parameters(world, task), versions[-1])
    assert world.task(task["task_id"])["rounds_committed"] == 3


@pytest.mark.sampled(every=3)
def test_no_more_devices_work_at_once_than_asked_for(world: World) -> None:
    asynchronous(world, cohort=3, concurrency=4)
    devices = world.add_devices(6)
    seated = seats(world, devices)
    assert len(seated) == 4
    seated[0].updating(**update(0))
    world.settle()
    rest = [device for device in devices if device not in seated]
    assert len(seats(world, rest)) == 1


def test_a_seat_is_given_up_in_time(world: World) -> None:
    asynchronous(world, cohort=3, concurrency=3, deadlines={"updating": 60})
    devices = world.add_devices(4)
    seated = seats(world, devices)
    [left] = [device for device in devices if device not in seated]
    world.clock.now += 61
    for device in devices:
        device.open_session()
    assert seats(world, [left]) == [left]
    status, answer = seated[0].try_upload(b"x" * 10)
    assert (status, "time" in answer["detail"]) == (410, True)


def between_rounds(world: World, devices: list[Device], **settings: Any) -> str:
    """A task whose round was committed with half of the devices while the task is paused: none follows."""
    task = str(asynchronous(world, **settings)["task_id"])
    assert seats(world, devices) == devices
    world.operator("POST", f"/v1/tasks/{task}/pause")
    for index, device in enumerate(devices[:3]):
        device.updating(**update(index))
    world.settle()
    assert [row["phase"] for row in world.rounds(task)] == ["committed"]
    return task


@pytest.mark.sampled(every=3)
def test_a_task_that_is_cancelled_between_rounds_lets_its_devices_go(world: World) -> None:
    devices = world.add_devices(6)
    task = between_rounds(world, devices)
    world.operator("POST", f"/v1/tasks/{task}/cancel")
    asynchronous(world)
    assert seats(world, devices) == devices


@pytest.mark.sampled(every=3)
def test_a_paused_task_keeps_devices_no_longer_than_their_seats_last(world: World) -> None:
    devices = world.add_devices(6)
    between_rounds(world, devices, deadlines={"updating": 60})
    other = asynchronous(world)
    assert seats(world, devices[:3]) == devices[:3]
    world.clock.now += 61
    for device in devices:
        device.open_session()
    assert seats(world, devices[3:]) == devices[3:]
    assert {device.plan.task_id for device in devices} == {other["task_id"]}


@pytest.mark.sampled(every=3)
def test_an_update_beyond_the_allowed_staleness_is_refused(world: World) -> None:
    task = asynchronous(world, max_staleness=0)
    devices = world.add_devices(6)
    seats(world, devices)
    for index, device in enumerate(devices[:3]):
        device.updating(**update(index))
    world.settle()
    assert world.task(task["task_id"])["rounds_committed"] == 1
    status, answer = devices[3].try_upload(b"x")
    assert (status, "versions" in answer["detail"]) == (410, True)


@pytest.mark.sampled(every=3)
def test_a_buffer_that_does_not_fill_in_time_fails_or_is_taken_as_it_is(world: World) -> None:
    devices = world.add_devices(5)
    for given, phase in ((3, "committed"), (2, "failed")):
        task = asynchronous(world, cohort=5, deadlines={"buffering": 100, "updating": 1000})
        for index, device in enumerate(seats(world, devices)[:given]):
            device.updating(**update(index))
        world.settle()
        world.clock.now += 101
        world.settle()
        assert world.rounds(task["task_id"])[0]["phase"] == phase
        world.operator("POST", f"/v1/tasks/{task['task_id']}/cancel")
        world.settle()
        world.clock.now += 1000
        for device in devices:
            device.open_session()


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize("kill", range(12))
def test_a_killed_coordinator_loses_no_update(world: World, kill: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed at its `kill`th durable step (file or transaction) and started again, the versions are the same."""
    from archipel.server.processes import coordinator as module
    from archipel.server.rounds import committing

    task = asynchronous(world, rounds=2)
    devices = world.add_devices(6)
    seats(world, devices)
    updates = [update(index, 1.0 + index) for index in range(6)]

    class Killed(BaseException):
        pass

    steps = 0

    def counted(function: Callable[P, R], after: bool) -> Callable[P, R]:
        def wrapper(*args: P.args, **named: P.kwargs) -> R:
            nonlocal steps
            steps += 1
            if steps == kill and not after:
                raise Killed
            made = function(*args, **named)
            if steps == kill and after:
                raise Killed
            return made

        return wrapper

    spool = type(world.services.spool)
    monkeypatch.setattr(spool, "keep_sum", counted(spool.keep_sum, after=True))
    monkeypatch.setattr(spool, "drop", counted(spool.drop, after=False))
    monkeypatch.setattr(module.folding, "record", counted(module.folding.record, after=False))
    monkeypatch.setattr(committing, "commit_round", counted(committing.commit_round, after=False))
    monkeypatch.setattr(module.folding, "forget", counted(module.folding.forget, after=False))
    for device, values in zip(devices, updates):
        device.updating(**values)
        try:
            world.settle()
        except Killed:
            world.restart_coordinator()
            world.settle()
    assert steps >= kill  # or nothing was killed
    assert world.task(task["task_id"])["rounds_committed"] == 2
    first = mean(updates[:3])
    second = mean(updates[3:], [2**-0.5] * 3)
    same(parameters(world, task), {name: first[name] + second[name] for name in first})


@pytest.mark.sampled(every=4)
def test_secure_groups_overlap_and_each_makes_a_version_of_the_newest(world: World) -> None:
    task = asynchronous(world, privacy="secure", cohort=3, threshold=3, concurrency=6, rounds=2)
    devices = world.add_devices(6)
    for device in devices[:3]:
        device.check_in()
    world.settle()
    assert all(device.join() for device in devices[:3])
    for device in devices[3:]:
        device.check_in()
    world.settle()
    assert all(device.join() for device in devices[3:])
    groups = [devices[:3], devices[3:]]
    assert len({device.plan.round_id for device in devices}) == 2
    updates = [give_updates(group, [1, 2, 1]) for group in groups]
    assert groups[1][0].plan.staleness_exponent == 0.5
    for group in groups:
        world.run_to("unmasking", group)
        for device in group:
            device.answer("unmasking")
        if group is groups[0]:
            assert groups[1][0].status().staleness == 0
        world.settle()
        if group is groups[0]:
            assert groups[1][0].status().staleness == 1
    assert world.task(task["task_id"])["rounds_committed"] == 2
    total: Update = {"w": np.zeros((3, 2)), "b": np.zeros(2)}
    for group_updates in updates:
        w, b = expected_parameters(group_updates)
        total["w"], total["b"] = total["w"] + w, total["b"] + b
    found = new_parameters(world, task)
    np.testing.assert_allclose(found["w"], total["w"], rtol=1e-6)
    np.testing.assert_allclose(found["b"], total["b"], rtol=1e-6)
    assert [row["number"] for row in world.rounds(task["task_id"])] == [1, 1]


@pytest.mark.sampled(every=3)
def test_a_group_that_is_not_needed_any_more_says_so(world: World) -> None:
    task = asynchronous(world, privacy="secure", threshold=3, cohort=3, rounds=1)
    devices = world.add_devices(6)
    for group in (devices[:3], devices[3:]):
        world.start_round(group)
        world.clock.now += 1
    world.run_to("unmasking", devices[:3])
    for device in devices[:3]:
        device.unmasking()
    world.settle()
    assert world.task(task["task_id"])["state"] == "completed"
    first, second = world.rounds(task["task_id"])
    assert (first["phase"], first["reason"]) == ("committed", "")
    assert (second["phase"], second["reason"]) == ("failed", "not needed: the task is completed")
