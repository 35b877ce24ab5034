"""An enrolled device sends random numbers instead of its masked update, in every round that it is in.

It wants the task to end: the sum makes no sense, the round fails, nobody can see whose vector it was, and after five
failed rounds in a row a task is failed for good. What stops it: the server lets chance decide who is in the next
rounds, few of the suspects among others, counts who was in the spoiled ones, and sets the device aside.
"""

from __future__ import annotations

import pytest

from tests.attacks.faults_world import (  # noqa: F401  (fixtures)
    bundle_file,
    data_folder,
    empty_database,
    keys,
    noise_from,
    play,
    play_round,
    server_settings,
    world,
)
from tests.support.world import World


@pytest.mark.sampled(every=8)
def test_it_is_found_and_the_task_goes_on(world: World) -> None:  # noqa: F811
    task = world.create_task(rounds=30, cohort=4, min_cohort=4, threshold=3)
    devices = world.add_devices(9)
    spoiler = devices[3]
    play(world, task["task_id"], devices, noise_from(spoiler))
    after = world.task(task["task_id"])
    assert (after["state"], after["rounds_committed"]) == ("completed", 30), after["reason"]
    (aside,) = [each for each in world.operator("GET", "/v1/devices")[1]["items"] if each["quarantine"]]
    assert aside["device_id"] == spoiler.id
    assert aside["quarantine"]["reason"] == "spoils rounds"
    # No round that it was in is among those whose sum counts.
    for each in world.rounds(task["task_id"]):
        members = {member["device_id"] for member in each["participants"]}
        assert each["spoiled"] == (spoiler.id in members), each
        assert len(members) == 4


@pytest.mark.sampled(every=8)
def test_where_every_device_is_needed_it_cannot_be_found_and_the_task_says_so(world: World) -> None:  # noqa: F811
    task = world.create_task(rounds=3, cohort=4, min_cohort=4, threshold=3)
    devices = world.add_devices(4)
    play(world, task["task_id"], devices, noise_from(devices[0]))
    after = world.task(task["task_id"])
    assert (after["state"], after["failed_rounds"], after["spoiled_rounds"]) == ("failed", 5, 6)
    assert "whose doing it is cannot be found out: no device could be left out" in after["reason"]
    assert not any(each["quarantine"] for each in world.operator("GET", "/v1/devices")[1]["items"])


@pytest.mark.sampled(every=3)
def test_a_round_that_too_few_devices_answer_in_makes_nobody_a_suspect(world: World) -> None:  # noqa: F811
    task = world.create_task(rounds=1, cohort=4, min_cohort=4, threshold=3)
    devices = world.add_devices(6)
    world.start_round_at_deadline(devices[:4])
    for device in devices[:3]:
        device.advertising()
    world.clock.now += 121
    world.settle()
    after = world.task(task["task_id"])
    assert (after["failed_rounds"], after["spoiled_rounds"], after["search"]) == (1, 0, "")
    assert world.operator("GET", "/v1/populations/pupils")[1]["search"] is None
    assert not any(each["suspicion"] for each in world.operator("GET", "/v1/devices")[1]["items"])


@pytest.mark.sampled(every=4)
def test_the_operator_sees_the_search_while_it_goes_on(world: World) -> None:  # noqa: F811
    task = world.create_task(rounds=9, cohort=4, min_cohort=4, threshold=3)
    devices = world.add_devices(8)
    spoiler = devices[0]
    members = [spoiler, *devices[1:4]]
    assert set(play_round(world, members, noise_from(spoiler))) == set(members)
    (found,) = world.rounds(task["task_id"])
    assert (found["phase"], found["spoiled"], found["faults"], found["set_aside"]) == ("failed", True, [], [])
    after = world.task(task["task_id"])
    assert after["search"] == (
        "1 of the last 1 secure rounds of population 'pupils' were spoiled, and 0 since then were good; 4 devices that "
        "were in spoiled ones are mixed with others to find out whose doing it is"
    )
    search = world.operator("GET", "/v1/populations/pupils")[1]["search"]
    assert (search["rounds"], search["spoiled"], search["quiet"], search["suspects"]) == (1, 1, 0, 4)
    shown = {each["device_id"]: each["suspicion"] for each in world.operator("GET", "/v1/devices")[1]["items"]}
    # The round took all that waited: it says nothing about any of them.
    assert [shown[device.id] for device in members] == [{"rounds": 1, "spoiled": 1, "odds": 1.0}] * 4
    assert [shown[device.id] for device in devices[4:]] == [None] * 4
    # Of the next one they are a quarter.
    for device in devices:
        device.check_in()
    world.settle()
    here = [device for device in devices if device.join()]
    assert len(here) == 4
    assert sum(device in members for device in here) <= 1


@pytest.mark.sampled(every=4)
def test_a_search_waits_for_more_devices_than_a_round_takes(world: World) -> None:  # noqa: F811
    """Who is quick to come would be in every round, and nothing be left to chance: the spoiler among them stays."""
    task = world.create_task(rounds=9, cohort=4, min_cohort=4, threshold=3)
    devices = world.add_devices(8)
    play_round(world, devices[:4], noise_from(devices[0]))
    assert world.task(task["task_id"])["spoiled_rounds"] == 1
    for device in devices[:4]:
        device.check_in()
    world.settle()
    assert not any(device.join() for device in devices[:4])
    for device in devices[4:]:
        device.check_in()
    world.settle()
    assert sum(bool(device.join()) for device in devices) == 4


@pytest.mark.sampled(every=4)
def test_one_that_is_in_every_round_of_a_small_fleet_does_not_end_the_task(world: World) -> None:  # noqa: F811
    """A round takes everybody who is there: without a search the fifth would have been the last."""
    task = world.create_task(rounds=2, cohort=6, min_cohort=4, threshold=4)
    devices = world.add_devices(6)
    for _ in range(6):
        play_round(world, devices, noise_from(devices[0]))
        if world.task(task["task_id"])["state"] == "completed":
            break
    after = world.task(task["task_id"])
    assert after["state"] != "failed"
    assert after["failed_rounds"] == 0
    play(world, task["task_id"], devices, noise_from(devices[0]))
    assert world.task(task["task_id"])["state"] == "completed"
