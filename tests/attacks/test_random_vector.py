"""An enrolled device sends random numbers instead of its masked update, in every round that it is in.

It wants the task to end: the sum makes no sense, the round fails, nobody can see whose vector it was, and after five
failed rounds in a row a task is failed for good. What stops it: the server lets chance decide who is in the next
rounds, few of the suspects among others, counts who was in the spoiled ones, and sets the device aside.
"""

from __future__ import annotations

from typing import Any

from tests.attacks.faults_world import (  # noqa: F401  (fixtures)
    bundle_file,
    data_folder,
    empty_database,
    keys,
    noise_from,
    play,
    server_settings,
    world,
)


def test_it_is_found_and_the_task_goes_on(world: Any) -> None:  # noqa: F811
    task = world.create_task(rounds=30, cohort=4, min_cohort=4, threshold=3)
    devices = world.add_devices(9)
    spoiler = devices[3]
    try:
        play(world, task["task_id"], devices, noise_from(spoiler))
    finally:
        for each in world.rounds(task["task_id"]):
            print(each["phase"], each["reason"], each["suspects"], [m["furthest"] for m in each["participants"]])
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
