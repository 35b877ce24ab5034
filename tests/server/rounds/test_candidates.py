"""Whom a task takes: by what devices tell, how often they took part, and when they did last."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.support.devices import Device
from tests.support.world import World

PHONE: dict[str, str | float | bool] = {"ram": 4 * 2.0**30, "charging": True, "app": "1.4"}


def phones(world: World, count: int, **attributes: str | float | bool) -> list[Device]:
    devices = world.add_devices(count)
    for device in devices:
        device.attributes = {**PHONE, **attributes}
    return devices


def whole_round(world: World, devices: Sequence[Device]) -> None:
    world.clock.now += 1
    world.start_round(devices)
    world.run_to("unmasking", devices)
    for device in devices:
        device.unmasking()
    world.settle()


def members(world: World, task: dict[str, Any]) -> list[set[str]]:
    return [{each["device_id"] for each in made["participants"]} for made in world.rounds(task["task_id"])]


@pytest.mark.sampled(every=3)
def test_only_eligible_devices_are_taken(world: World) -> None:
    task = world.create_task(eligibility='ram >= 512MiB and charging and app == "1.4"', cohort=5)
    good = phones(world, 5)
    bad = [*phones(world, 2, ram=256.0 * 2**20), *phones(world, 2, charging=False), *phones(world, 2, app="1.3")]
    for device in bad:
        assert device.check_in() is None
    world.settle()
    assert world.task(task["task_id"])["waiting"] == 0
    assert members(world, task) == []  # nobody is there for a round to be opened
    whole_round(world, good)
    assert members(world, task) == [{device.id for device in good}]
    assert world.task(task["task_id"])["state"] == "completed"


@pytest.mark.sampled(every=3)
def test_what_a_device_told_last_counts(world: World) -> None:
    task = world.create_task(eligibility="charging", cohort=4, min_cohort=3, deadlines={"assigning": 5})
    devices = phones(world, 4)
    for device in devices[:3]:
        device.check_in()
    world.settle()  # a round is open and waits for the fourth
    devices[0].attributes = {**PHONE, "charging": False}
    devices[0].check_in()
    assert world.task(task["task_id"])["waiting"] == 2
    devices[3].check_in()
    world.clock.now += 6
    for device in devices:
        device.check_in()
    world.settle()
    assert members(world, task) == [{device.id for device in devices[1:]}]


@pytest.mark.sampled(every=3)
def test_a_device_contributes_no_more_often_than_allowed(world: World) -> None:
    task = world.create_task(rounds=3, cohort=3, max_contributions=1)
    first, second = phones(world, 3), phones(world, 3)
    whole_round(world, first)
    for device in first:
        assert device.check_in() is None
    world.settle()
    assert len(members(world, task)) == 1
    whole_round(world, second)
    assert members(world, task) == [{device.id for device in each} for each in (first, second)]


@pytest.mark.sampled(every=4)
def test_a_failed_round_is_no_contribution(world: World) -> None:
    task = world.create_task(cohort=3, max_contributions=1)
    devices = phones(world, 3)
    world.start_round(devices)
    world.run_to("confirming", devices)
    world.clock.now += 3600
    for device in devices:
        device.open_session()
    world.settle()
    whole_round(world, devices)
    assert [each["phase"] for each in world.rounds(task["task_id"])] == ["failed", "committed"]


@pytest.mark.sampled(every=4)
def test_a_device_rests(world: World) -> None:
    task = world.create_task(rounds=2, cohort=3, rest_seconds=600.0)
    devices = phones(world, 3)
    whole_round(world, devices)
    world.clock.now += 500
    for device in devices:
        assert device.check_in() is None
    world.settle()
    assert world.task(task["task_id"])["waiting"] == 0
    world.clock.now += 101
    whole_round(world, devices)
    assert world.task(task["task_id"])["state"] == "completed"


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"eligibility": "ram >= 5mb"}, "unknown unit 'mb'"),
        ({"eligibility": "__import__('os')"}, "eligibility"),
        ({"eligibility": "x" * 1025}, "eligibility"),
        ({"max_contributions": 0}, "max_contributions"),
        ({"rest_seconds": -1}, "rest_seconds"),
    ],
)
def test_what_cannot_be_is_refused_when_the_task_is_made(
    world: World, settings: dict[str, str | int], word: str
) -> None:
    values = {
        "name": "digits", "population": "pupils", "rounds": 1, "min_cohort": 3, "cohort": 5,
        "bundle": world.publish(), **settings,
    }  # fmt: skip
    status, answer = world.operator("POST", "/v1/tasks", values)
    assert status in (400, 422)
    assert word in answer["detail"]


def waits_for(world: World, task: dict[str, Any]) -> str:
    [listed] = [each for each in world.operator("GET", "/v1/tasks")[1]["items"] if each["task_id"] == task["task_id"]]
    shown = world.task(task["task_id"])
    assert listed["waiting_for"] == shown["waiting_for"]
    return str(shown["waiting_for"])


@pytest.mark.sampled(every=4)
def test_a_task_that_cannot_go_on_says_what_it_waits_for(world: World) -> None:
    other = world.create_task(population="plnat")
    few = world.create_task(cohort=6, min_cohort=6, threshold=6)
    misspelt = world.create_task(eligibility="rma >= 1GB and charging")
    wrong = world.create_task(eligibility="ram >= 1TB")
    some = world.create_task(eligibility='app == "1.4" and battery > 1', min_cohort=4, threshold=4)
    assert waits_for(world, few) == "no device is enrolled in population 'pupils'"
    devices = phones(world, 5, battery=50.0)
    devices[4].attributes["app"] = devices[3].attributes["app"] = "1.3"
    assert waits_for(world, some) == "no device is waiting; 4 needed"
    for device in devices:
        device.check_in()
    assert waits_for(world, other) == "no device is enrolled in population 'plnat'"
    assert waits_for(world, few) == "5 devices waiting; 6 needed, 5 enrolled in population 'pupils'"
    assert waits_for(world, misspelt) == "no device of the population reports 'rma'; 3 needed"
    nobody = "of the 5 devices that were here last none is eligible; 3 needed"
    assert waits_for(world, wrong) == nobody
    assert waits_for(world, some) == "3 of 5 devices that wait may take part; 4 needed"
    world.operator("POST", f"/v1/tasks/{some['task_id']}/pause")
    assert waits_for(world, some) == ""
    world.create_task()
    world.settle()
    assert all(device.join() for device in devices)
    assert waits_for(world, wrong) == nobody  # also while they are busy elsewhere
    assert waits_for(world, few) == "no device is waiting; 6 needed, 5 enrolled in population 'pupils'"


@pytest.mark.parametrize("privacy", ["secure", "plain"])
@pytest.mark.sampled(every=4)
def test_it_says_so_when_all_have_given_what_they_may(world: World, privacy: str) -> None:
    plain = {"privacy": "plain", "threshold": None, "mode": "asynchronous"} if privacy == "plain" else {}
    task = world.create_task(rounds=2, cohort=3, max_contributions=1, **plain)
    devices = phones(world, 3)
    world.start_round(devices)
    assert waits_for(world, task) == ""
    if privacy == "plain":
        for device in devices:
            device.updating(**{"w.update": [[0, 0]] * 3, "b.update": [0, 0], "weight": 1.0})
    else:
        world.run_to("unmasking", devices)
        for device in devices:
            device.unmasking()
    world.settle()
    assert world.task(task["task_id"])["rounds_committed"] == 1
    world.clock.now += 1
    for device in devices:
        device.check_in()
    world.settle()
    needed = 1 if privacy == "plain" else 3
    assert waits_for(world, task) == f"all waiting devices have given their 1 contribution; {needed} needed"
