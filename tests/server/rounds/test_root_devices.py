"""FLTrust on a server: the update of a device that the operator trusts is what the others are compared with.

What a round makes is computed here by NumPy, from the paper's formula (Cao et al. 2021, section 4.1).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from archipel.server.database.fault_tables import Quarantine
from archipel.server.database.tables import CheckInRow
from tests.server.rounds.test_leaving import leave
from tests.server.rounds.test_plain_rounds import Update, parameters, same, update
from tests.support.devices import Device
from tests.support.world import World


def flat(each: Update) -> np.ndarray:
    """What a device changed, without its weight, as one row."""
    both = [np.asarray(each[f"{name}.update"], np.float64).reshape(-1) for name in ("w", "b")]
    return np.concatenate(both) / float(each["weight"])


def fltrust(updates: list[Update], root: Update) -> Update:
    trusted = flat(root)
    length, total, made = np.sqrt(trusted @ trusted), 0.0, np.zeros(8)
    for row in map(flat, updates):
        cosine = (row @ trusted) / (np.sqrt(row @ row) * length)
        score = max(cosine, 0.0)
        total += score
        made += score * (length / np.sqrt(row @ row)) * row
    made = made / total if total else made
    return {"w": made[:6].reshape(3, 2), "b": made[6:]}


def alike(seed: int, weight: float = 1.0) -> Update:
    """Updates of different devices that want about the same."""
    common, own = update(1000), update(seed)
    return {
        name: np.asarray(weight * (common[name] + 0.7 * own[name]), np.float32) for name in ("w.update", "b.update")
    } | {"weight": np.array(weight, np.float32)}


def rooted(world: World, others: int = 3, **more: Any) -> tuple[dict[str, Any], Device, list[Device]]:
    """A task, its root device, and the other devices."""
    root, *devices = world.add_devices(1 + others)
    settings = {"privacy": "plain", "threshold": None, "min_cohort": others, "cohort": others, **more}
    return world.create_task(aggregation={"rule": "fltrust", "root": root.id}, **settings), root, devices


def send(world: World, devices: list[Device], updates: list[Update]) -> None:
    for device, values in zip(devices, updates, strict=True):
        device.updating(**values)
        world.settle()


def revoke(world: World, device: Device) -> None:
    assert world.operator("POST", f"/v1/devices/{device.id}/revoke")[0] == 200


@pytest.mark.sampled(every=3)
def test_the_model_moves_by_the_updates_that_point_as_the_root_does(world: World) -> None:
    task, root, devices = rooted(world, 4)
    world.start_round([root, *devices])
    trusted, updates = alike(0, 3.0), [alike(index, float(index)) for index in range(1, 5)]
    send(world, [devices[0], root, *devices[1:]], [updates[0], trusted, *updates[1:]])
    [shown] = world.rounds(task["task_id"])
    assert (shown["phase"], shown["weight_sum"]) == ("committed", 10.0)
    assert sorted(shown["survivors"]) == sorted(device.id for device in devices)
    assert len(shown["participants"]) == 5
    same(parameters(world, task), fltrust(updates, trusted))
    assert world.task(task["task_id"])["aggregation"]["root"] == root.id
    assert world.stored("updates") == {}


@pytest.mark.sampled(every=4)
def test_what_liars_send_moves_the_model_no_further_than_the_root_and_never_the_other_way(world: World) -> None:
    task, root, devices = rooted(world, 5)
    world.start_round([root, *devices])
    trusted, updates = alike(0), [alike(index) for index in range(1, 6)]
    for liar in (0, 3):
        updates[liar] = {name: np.asarray(-8 * array, np.float32) for name, array in updates[liar].items()}
        updates[liar]["weight"] = np.array(1.0, np.float32)
    send(world, [root, *devices], [trusted, *updates])
    made = parameters(world, task)
    honest = [each for index, each in enumerate(updates) if index not in (0, 3)]
    same(made, fltrust(honest, trusted))  # as if the liars had not been there
    row = np.concatenate([made["w"].reshape(-1), made["b"]])
    assert np.linalg.norm(row) <= np.linalg.norm(flat(trusted)) * (1 + 1e-6)
    assert row @ flat(trusted) > 0


@pytest.mark.sampled(every=3)
def test_a_round_begins_only_when_the_root_device_waits(world: World) -> None:
    task, root, devices = rooted(world)
    for device in devices:
        device.check_in()
    world.settle()
    assert world.rounds(task["task_id"]) == []
    shown = world.task(task["task_id"])
    assert (shown["waiting"], shown["waiting_for"]) == (3, f"its root device {root.id} does not wait for a round")
    world.start_round([root, *devices])
    assert {device.status().phase for device in [root, *devices]} == {"updating"}


@pytest.mark.sampled(every=3)
def test_the_root_device_does_not_count_as_one_of_the_cohort(world: World) -> None:
    task, root, devices = rooted(world)
    for device in (root, *devices[:2]):
        device.check_in()
    world.settle()
    assert world.rounds(task["task_id"]) == []
    assert "3 needed" in world.task(task["task_id"])["waiting_for"]


@pytest.mark.sampled(every=4)
def test_limits_of_how_often_devices_are_taken_do_not_hold_for_the_root_device(world: World) -> None:
    task, root, devices = rooted(
        world, 3, rounds=2, max_contributions=1, eligibility="ram > 1", rest_seconds=3600.0,
    )  # fmt: skip
    more = world.add_devices(3)
    for device in (*devices, *more):
        device.attributes = {"ram": 2.0}
    for turn in (devices, more):
        world.start_round([root, *turn])
        send(world, [root, *turn], [alike(index) for index in range(4)])
    assert world.task(task["task_id"])["state"] == "completed"


@pytest.mark.sampled(every=3)
def test_other_trainings_leave_the_root_device_alone_while_its_task_runs(world: World) -> None:
    task, root, devices = rooted(world)
    other = world.create_task(privacy="plain", threshold=None, min_cohort=3, cohort=3)
    for device in (root, *devices[:2]):
        device.check_in()
    world.settle()
    assert world.rounds(other["task_id"]) == []
    world.operator("POST", f"/v1/tasks/{task['task_id']}/cancel")
    world.settle()
    [shown] = world.rounds(other["task_id"])
    assert root.id in [each["device_id"] for each in shown["participants"]]


@pytest.mark.sampled(every=3)
def test_goal_updates_do_not_end_a_round_without_the_root(world: World) -> None:
    task, root, devices = rooted(world, 5, min_cohort=3, goal=3)
    world.start_round([root, *devices])
    trusted, updates = alike(0), [alike(index) for index in range(1, 5)]
    send(world, devices[:4], updates)
    assert devices[0].status().phase == "updating"
    line = world.task(task["task_id"])["under_way"]
    assert f"4 of 5 devices have answered, without its root device {root.id}" in line
    world.restart_coordinator()
    send(world, [root], [trusted])
    # All that came by then are in it: a plain round with a rule takes every acknowledged update.
    same(parameters(world, task), fltrust(updates, trusted))


@pytest.mark.sampled(every=3)
def test_a_round_without_the_root_update_fails_with_the_reason_and_is_repeated(world: World) -> None:
    task, root, devices = rooted(world)
    world.start_round([root, *devices])
    send(world, devices, [alike(index) for index in range(1, 4)])
    assert devices[0].status().phase == "updating"  # it waits until the deadline
    world.clock.now += 181
    world.settle()
    [shown] = world.rounds(task["task_id"])
    assert (shown["phase"], shown["weights_out"]) == ("failed", None)
    assert shown["reason"] == "the task's root device has sent no update, at the deadline of phase updating"
    assert world.stored("updates") == {}
    world.start_round([root, *devices])
    trusted, updates = alike(0), [alike(index) for index in range(1, 4)]
    send(world, [root, *devices], [trusted, *updates])
    same(parameters(world, task), fltrust(updates, trusted))


@pytest.mark.sampled(every=4)
def test_a_round_that_the_root_device_leaves_fails_at_once(world: World) -> None:
    task, root, devices = rooted(world)
    world.start_round([root, *devices])
    leave(root)
    world.settle()
    [shown] = world.rounds(task["task_id"])
    assert (shown["phase"], shown["reason"]) == ("failed", "the task's root device left the round")


def test_a_root_device_that_is_gone_when_the_round_begins_fails_it_at_the_deadline(world: World) -> None:
    task, root, devices = rooted(world, 4, min_cohort=3)
    for device in (root, *devices[:3]):
        device.check_in()
    world.settle()  # enough to open the round, which waits for a fourth device
    world.clock.now += 61
    for device in devices[:3]:
        device.check_in()
    with world.services.database.write() as session:
        session.get_one(CheckInRow, root.id).due = 0.0
    world.settle()
    shown = world.rounds(task["task_id"])[0]
    assert shown["reason"] == "the task's root device does not wait for a round, at the deadline of phase assigning"


@pytest.mark.sampled(every=6)
def test_deadlines_leave_a_slow_root_device_its_time(world: World) -> None:
    """The others answer at once, the root device after 40 s: a fourth of the deadline that follows from it."""
    task, root, devices = rooted(world, rounds=4)
    for number in range(3):
        world.start_round([root, *devices])
        send(world, devices, [alike(10 * number + index) for index in range(1, 4)])
        world.clock.now += 40
        send(world, [root], [alike(10 * number)])
    world.start_round([root, *devices])
    assert world.rounds(task["task_id"])[3]["deadlines"]["updating"] == 4 * 40
    send(world, devices, [alike(index) for index in range(1, 4)])
    world.clock.now += 161
    world.settle()
    # It was too slow, and nobody knows what it would have taken: the default holds.
    world.start_round([root, *devices])
    assert "updating" not in world.rounds(task["task_id"])[4]["deadlines"]


@pytest.mark.parametrize("sent", [False, True])
@pytest.mark.sampled(every=4)
def test_a_root_device_that_is_revoked_ends_the_round_and_its_task(world: World, sent: bool) -> None:
    task, root, devices = rooted(world)
    world.start_round([root, *devices])
    send(world, devices[:2], [alike(1), alike(2)])
    if sent:
        send(world, [root], [alike(0)])
    revoke(world, root)
    world.settle()
    [shown] = world.rounds(task["task_id"])
    assert (shown["phase"], shown["weights_out"]) == ("failed", None)
    assert shown["reason"] == "the task's root device was revoked"
    ended = world.task(task["task_id"])
    assert (ended["state"], ended["reason"]) == ("failed", "the task's root device was revoked")


def test_no_version_is_made_by_a_root_that_was_revoked_while_the_server_computed(world: World) -> None:
    task, root, devices = rooted(world)
    world.start_round([root, *devices])
    for device, values in zip([root, *devices], [alike(index) for index in range(4)]):
        device.updating(**values)
    assert world.coordinator.step()
    assert devices[0].status().phase == "aggregating"
    revoke(world, root)
    world.settle()
    [shown] = world.rounds(task["task_id"])
    assert (shown["phase"], shown["reason"]) == ("failed", "the task's root device was revoked")
    assert world.task(task["task_id"])["state"] == "failed"


def ask(world: World, **settings: Any) -> tuple[int, str]:
    values = {
        "name": "digits", "population": "pupils", "rounds": 1, "min_cohort": 3, "cohort": 5, "privacy": "plain",
        "bundle": world.publish(), **settings,
    }  # fmt: skip
    status, answer = world.operator("POST", "/v1/tasks", values)
    return status, answer.get("detail", "")


@pytest.mark.sampled(every=3)
def test_a_task_whose_root_device_cannot_take_part_is_refused(world: World) -> None:
    gone, aside, good = world.add_devices(3)
    revoke(world, gone)
    rule = {"rule": "fltrust"}
    task = world.create_task(privacy="plain", threshold=None, min_cohort=3, cohort=3)
    world.start_round([aside, *world.add_devices(2)])
    with world.services.database.write() as session:
        session.add(
            Quarantine(
                device_id=aside.id,
                population="pupils",
                reason="spoils rounds",
                detail="",
                times=1,
                round_id=world.rounds(task["task_id"])[0]["round_id"],
                since=0.0,
                until=world.clock.now + 60,
            )
        )
    for settings, status, words in (
        ({"aggregation": rule}, 422, "give the device's id as aggregation.root"),
        ({"aggregation": rule | {"root": "0" * 32}}, 422, f"no device {'0' * 32} in population 'pupils'"),
        ({"aggregation": rule | {"root": good.id}, "population": "others"}, 422, f"no device {good.id} in population"),
        ({"aggregation": rule | {"root": gone.id}}, 422, f"device {gone.id} was revoked"),
        ({"aggregation": rule | {"root": aside.id}}, 422, f"device {aside.id} is set aside"),
        ({"aggregation": rule | {"root": "me"}}, 400, "root"),
        ({"aggregation": {"rule": "median", "root": good.id}}, 400, "rule 'median' takes no update as a root"),
        ({"aggregation": {"root": good.id}}, 400, "rule 'mean' takes no update as a root"),
        ({"aggregation": rule | {"root": good.id}, "privacy": "secure"}, 422, "set privacy to 'plain'"),
        (
            {"aggregation": rule | {"root": good.id}, "privacy": "secure", "secure_groups": 1}, 422,
            "secure groups show sums only",
        ),
        ({"aggregation": rule | {"root": good.id}, "mode": "asynchronous"}, 422, "updates of one"),
        ({"aggregation": rule | {"root": good.id, "most_bytes": 6 * 9 * 28 - 1}}, 422, "more than most_bytes"),
    ):  # fmt: skip
        found, message = ask(world, **settings)
        assert (found, words in message) == (status, True), (settings, found, message)
    assert ask(world, aggregation=rule | {"root": good.id, "most_bytes": 6 * 9 * 28})[0] == 201
