"""Rounds in secure groups: each group has a sum of its own, and the model moves by the rule over their means."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from archipel.server.database.tables import Round
from archipel.server.rounds.groups.grouping import deal
from tests.attacks.faults_world import upload_noise
from tests.server.rounds.test_plain_rounds import mean, parameters, same
from tests.server.rounds.test_robust_rounds import rows
from tests.server.rounds.test_secure_round import give_updates
from tests.support.devices import ANSWERED, Device
from tests.support.tiny_bundle import DELTA_STEP, WEIGHT_STEP
from tests.support.world import World

Update = dict[str, np.ndarray]


def grouped(world: World, rule: str = "median", tolerated: int = 1, **more: Any) -> dict[str, Any]:
    values = {"min_cohort": 3, "cohort": 9, "threshold": 2, "secure_groups": 3, **more}
    return world.create_task(aggregation={"rule": rule, "tolerated": tolerated}, **values)


def begin(world: World, devices: list[Device]) -> dict[str, list[Device]]:
    """The groups of a round that begins, by their round's id, in their order."""
    world.start_round(devices)
    groups: dict[str, list[Device]] = {}
    for device in devices:
        assert device.plan is not None
        groups.setdefault(device.plan.round_id, []).append(device)
    return groups


def answer(world: World, devices: list[Device], phases: tuple[str, ...] = ANSWERED) -> None:
    for phase in phases:
        for device in devices:
            device.answer(phase)
        world.settle()


def group_means(updates: dict[str, Update], groups: list[list[Device]]) -> Update:
    """`[groups, ...]` by name: the weighted mean of each group."""
    summed = []
    for group in groups:
        mine = [updates[device.id] for device in group]
        summed.append({name: sum(each[name].astype(np.float64) for each in mine) for name in mine[0]})
    return rows(summed)


def as_update(vector: np.ndarray) -> Update:
    """What the integers of a device's vector stand for."""
    deltas, weight = vector[:8] * DELTA_STEP, vector[8] * WEIGHT_STEP
    return {"w.update": deltas[:6].reshape(3, 2), "b.update": deltas[6:], "weight": np.array(weight)}


def give(devices: list[Device], weights: list[int]) -> dict[str, Update]:
    return {device.id: as_update(each) for device, each in zip(devices, give_updates(devices, weights), strict=True)}


def medians(updates: dict[str, Update], groups: list[list[Device]]) -> Update:
    return {name: np.median(each, axis=0) for name, each in group_means(updates, groups).items()}


@pytest.mark.sampled(every=4)
def test_the_model_moves_by_the_median_of_the_groups_means(world: World) -> None:
    task = grouped(world)
    devices = world.add_devices(9)
    groups = begin(world, devices)
    assert sorted(map(len, groups.values())) == [3, 3, 3]
    assert {(device.plan.min_cohort, device.plan.max_cohort) for device in devices if device.plan} == {(3, 3)}
    updates = give(devices, [1, 2, 1, 1, 3, 1, 2, 1, 1])
    answer(world, devices)
    assert world.task(task["task_id"])["state"] == "completed"
    same(parameters(world, task), medians(updates, list(groups.values())))
    shown = world.rounds(task["task_id"])
    assert {(each["phase"], each["number"], len(each["survivors"])) for each in shown} == {("committed", 1, 3)}
    [made] = [each for each in shown if each["weights_out"] is not None]
    assert {each["part_of"] for each in shown} == {made["round_id"]}
    [row] = world.operator("GET", f"/v1/tasks/{task['task_id']}/metrics")[1]["items"]
    assert (row["round_id"], row["devices"]) == (made["round_id"], 9)
    assert {device.status().phase for device in devices} == {"committed"}
    assert world.stored("updates") == {}


@pytest.mark.sampled(every=4)
def test_a_group_that_fails_is_left_out_and_the_others_wait_for_it(world: World) -> None:
    task = grouped(world, tolerated=0, rule="trimmed-mean")
    devices = world.add_devices(9)
    groups = list(begin(world, devices).values())
    updates = give(devices, [1] * 9)
    answer(world, devices, ANSWERED[:3])
    late = groups[0]  # whose plan names the round of all groups
    for device in late[1:]:
        device.masking()
    answer(world, [*groups[1], *groups[2]], ANSWERED[3:])
    world.restart_coordinator()
    world.settle()
    # Their sums wait much longer than the phase itself may take.
    world.clock.now += 45
    world.settle()
    assert {device.status().phase for device in groups[1]} == {"aggregating"}
    world.clock.now += 61
    world.settle()
    assert {each["phase"] for each in world.rounds(task["task_id"])} == {"failed", "committed"}
    means = group_means(updates, groups[1:])
    same(parameters(world, task), {name: each.mean(axis=0) for name, each in means.items()})
    info = world.task(task["task_id"])
    assert (info["state"], info["rounds_committed"]) == ("completed", 1)
    with world.services.database.read() as session:
        assert all(row.ended is not None for row in session.query(Round))


@pytest.mark.sampled(every=4)
def test_a_round_with_fewer_groups_than_its_rule_needs_fails_once_and_is_repeated(world: World) -> None:
    task = grouped(world)
    devices = world.add_devices(9)
    groups = list(begin(world, devices).values())
    answer(world, devices, ANSWERED[:3])
    answer(world, [*groups[1], *groups[2]], ANSWERED[3:])
    world.clock.now += 61
    world.settle()
    shown = world.rounds(task["task_id"])
    assert {each["phase"] for each in shown} == {"failed"}
    assert sum("2 groups are left, 3 needed" in each["reason"] for each in shown) == 2
    info = world.task(task["task_id"])
    assert (info["state"], info["failed_rounds"], info["rounds_committed"]) == ("running", 1, 0)
    assert world.stored("updates") == {}
    groups = list(begin(world, devices).values())
    updates = give(devices, [1] * 9)
    answer(world, devices)
    same(parameters(world, task), medians(updates, groups))


@pytest.mark.sampled(every=4)
def test_a_spoiled_group_is_left_out(world: World) -> None:
    """Nobody knows which device of the group it was, and no search begins; the others' sums count."""
    task = grouped(world, rule="mean", tolerated=0)
    devices = world.add_devices(9)
    groups = list(begin(world, devices).values())
    updates = give(devices, [1] * 9)
    answer(world, devices, ANSWERED[:3])
    upload_noise(groups[1][0])
    for device in devices:
        if device is not groups[1][0]:
            device.masking()
    world.settle()
    answer(world, devices, ANSWERED[4:])
    left = [*groups[0], *groups[2]]
    same(parameters(world, task), mean([updates[device.id] for device in left]))
    assert sorted(each["spoiled"] for each in world.rounds(task["task_id"])) == [False, False, True]
    assert world.task(task["task_id"])["spoiled_rounds"] == 0


@pytest.mark.sampled(every=3)
def test_a_round_without_enough_devices_for_all_groups_does_not_begin(world: World) -> None:
    task = grouped(world)
    for device in world.add_devices(8):
        device.check_in()
    world.settle()
    assert world.rounds(task["task_id"]) == []
    assert "9 needed" in world.task(task["task_id"])["waiting_for"]


def test_devices_are_dealt_out_by_chance_into_groups_of_one_size() -> None:
    devices = [f"{number:032x}" for number in range(11)]
    ways = set()
    for _ in range(50):
        dealt = deal(devices, 3)
        assert sorted(map(len, dealt)) == [3, 4, 4]
        assert sorted(device for group in dealt for device in group) == devices
        ways.add(tuple(frozenset(group) for group in dealt))
    assert len(ways) > 45  # of 11,550 of these sizes


@pytest.mark.sampled(every=3)
def test_a_cancelled_task_ends_all_groups(world: World) -> None:
    task = grouped(world)
    devices = world.add_devices(9)
    begin(world, devices)
    answer(world, devices, ANSWERED[:2])
    world.operator("POST", f"/v1/tasks/{task['task_id']}/cancel")
    world.settle()
    assert {each["phase"] for each in world.rounds(task["task_id"])} == {"failed"}
    assert world.stored("updates") == {}


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"privacy": "plain"}, "secure_groups: are of secure rounds"),
        ({"mode": "asynchronous"}, "asynchronous rounds add up updates of several versions"),
        ({"mode": "synchronous"}, "a group that fails is left out"),
        ({"goal": 9}, "a group that fails is left out"),
        ({"secure_groups": 4}, "4 groups of a cohort of 9 have 2 devices, below min_cohort 3"),
        ({"aggregation": {"rule": "median", "tolerated": 2}}, "3 updates a round are too few to tolerate 2"),
        (
            {"kind": "evaluation", "metrics": {"loss": 8.0}, "aggregation": {}},
            "secure_groups: belongs to tasks",
        ),
        ({"min_cohort": 2}, "min_cohort 2 is below the policy's 3"),
    ],
)
def test_groups_that_do_not_fit_are_refused(world: World, settings: dict[str, Any], words: str) -> None:
    values = {
        "name": "digits", "population": "pupils", "rounds": 1, "min_cohort": 3, "cohort": 9, "secure_groups": 3,
        "bundle": world.publish(), "aggregation": {"rule": "median", "tolerated": 1}, **settings,
    }  # fmt: skip
    status, told = world.operator("POST", "/v1/tasks", values)
    assert (status, words in told["detail"]) == (422, True), told
