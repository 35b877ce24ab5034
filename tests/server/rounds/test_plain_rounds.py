"""Rounds with privacy plain: every update is checked before it counts, and the mean is that of those that did."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from archipel.bundle import read_weights, write_weights
from archipel.server.database.tables import Device
from archipel.server.devices.revocation import revoke
from archipel.server.rounds import folding
from tests.support.world import World

Update = dict[str, np.ndarray]


def update(seed: int, weight: float = 1.0) -> Update:
    """Deltas that were multiplied with the weight, as `finish` does."""
    generator = np.random.default_rng(seed)
    return {
        "w.update": (weight * generator.normal(size=(3, 2))).astype(np.float32),
        "b.update": (weight * generator.normal(size=2)).astype(np.float32),
        "weight": np.array(weight, np.float32),
    }


def encoded(values: Update) -> bytes:
    return write_weights({name: np.asarray(array) for name, array in values.items()})


def mean(updates: list[Update], scales: list[float] | None = None) -> Update:
    """Computed without the product: the weighted mean of the deltas, each deltas times its scale."""
    scales = scales or [1.0] * len(updates)
    weight = sum(float(each["weight"]) for each in updates)
    return {
        name: sum(scale * each[f"{name}.update"].astype(np.float64) for scale, each in zip(scales, updates)) / weight
        for name in ("w", "b")
    }


def parameters(world: World, task: dict[str, Any]) -> Update:
    status, data = world.operator("GET", f"/v1/blobs/{world.task(task['task_id'])['model']}")
    assert status == 200
    return read_weights(data)


def same(found: Update, expected: Update) -> None:
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-6, atol=1e-7)


@pytest.mark.sampled(every=3)
def test_a_plain_round_takes_the_mean_of_what_arrived(world: World) -> None:
    task = world.create_task(privacy="plain", threshold=None, goal=4)
    devices = world.add_devices(5)
    world.start_round(devices)
    assert {device.status().phase for device in devices} == {"updating"}
    updates = [update(index, 1.0 + index) for index in range(4)]
    for device, values in zip(devices, updates):
        device.updating(**values)
        device.updating(**values)  # again, as after an answer that was lost: it counts once
    world.settle()
    assert devices[0].status().phase == "committed"
    [shown] = world.rounds(task["task_id"])
    assert (len(shown["survivors"]), shown["weight_sum"]) == (4, 10.0)
    same(parameters(world, task), mean(updates))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"weight": np.array(np.nan, np.float32)}, "not a number"),
        ({"weight": np.array(-1, np.float32)}, "at least 0"),
        ({"weight": np.array(9, np.float32)}, "up to"),
        ({"weight": np.array(1, np.float64)}, "expected float32"),
        ({"b.update": np.full(2, np.inf, np.float32)}, "not a number"),
        ({"b.update": np.zeros(3, np.float32)}, "got float32[3]"),
        ({"b.update": np.zeros((2, 1), np.float32)}, "got float32[2, 1]"),
        ({"w.update": np.full((3, 2), 45.0, np.float32)}, "norm"),
        ({"c.update": np.zeros(2, np.float32)}, "has the arrays"),
    ],
)
@pytest.mark.sampled(every=6)
def test_an_update_outside_its_bounds_does_not_count(world: World, change: Update, words: str) -> None:
    world.create_task(privacy="plain", threshold=None)
    devices = world.add_devices(3)
    world.start_round_at_deadline(devices)
    data = encoded({**update(1), **change})
    status, answer = devices[0].try_upload(data)
    assert status in (413, 422), answer
    if status == 422 and "bytes, an update" not in answer["detail"]:
        assert words in answer["detail"]
    # Where only the length gives it away, the reader itself has to find it.
    assert world.stored("updates") == {}
    devices[0].updating(**update(1))


def test_bytes_that_are_no_update_do_not_count(world: World) -> None:
    world.create_task(privacy="plain", threshold=None)
    devices = world.add_devices(3)
    world.start_round_at_deadline(devices)
    good = encoded(update(1))
    for data in (b"", good[:-1], good + b"x", bytes(len(good)), good[:9] + b"!" + good[10:]):
        assert devices[0].try_upload(data)[0] in (411, 413, 422), data[:20]
    devices[0].updating(**update(1))


@pytest.mark.sampled(every=3)
def test_a_synchronous_round_needs_its_goal_and_a_semi_synchronous_one_the_minimum(world: World) -> None:
    devices = world.add_devices(5)
    ended = {}
    for mode in ("synchronous", "semi-synchronous"):
        task = world.create_task(privacy="plain", threshold=None, mode=mode, goal=4)
        world.start_round(devices)
        for index, device in enumerate(devices[:3]):
            device.updating(**update(index))
        world.settle()
        assert devices[0].status().phase == "updating"
        world.clock.now += 181
        world.settle()
        ended[mode] = devices[0].status().phase
        world.operator("POST", f"/v1/tasks/{task['task_id']}/cancel")
        world.settle()
    assert ended == {"synchronous": "failed", "semi-synchronous": "committed"}


@pytest.mark.sampled(every=3)
def test_updates_are_folded_as_they_come_and_their_files_go(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("archipel.server.rounds.folding.BATCH", 2)
    task = world.create_task(privacy="plain", threshold=None, cohort=5)
    devices = world.add_devices(5)
    world.start_round(devices)
    updates = [update(index, 1.0 + index) for index in range(5)]
    files = []
    for device, values in zip(devices, updates):
        device.updating(**values)
        world.settle()
        world.restart_coordinator()  # nothing of it is in memory
        files.append(len(world.stored("updates")))
    assert files == [1, 1, 2, 1, 0]  # an update, a sum, a sum and an update, a sum; all gone when committed
    same(parameters(world, task), mean(updates))


@pytest.mark.sampled(every=3)
def test_updates_that_change_nothing_are_folded_too(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum's bytes, and so its name, are the same before and after."""
    monkeypatch.setattr("archipel.server.rounds.folding.BATCH", 2)
    task = world.create_task(privacy="plain", threshold=None, cohort=5)
    devices = world.add_devices(5)
    world.start_round(devices)
    nothing = {name: np.zeros_like(array) for name, array in update(0).items()} | {"weight": np.float32(1)}
    for device in devices:
        device.updating(**nothing)
        world.settle()
    assert world.rounds(task["task_id"])[0]["phase"] == "committed"


@pytest.mark.sampled(every=3)
def test_an_update_that_comes_again_is_kept_once_and_not_after_it_was_summed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folding, "BATCH", 2)
    world.create_task(privacy="plain", threshold=None, cohort=4)
    devices = world.add_devices(4)
    world.start_round(devices)
    updates = [encoded(update(index)) for index in range(4)]
    devices[0].upload(updates[0])
    (kept,) = world.stored("updates")
    devices[0].upload(updates[0])
    assert set(world.stored("updates")) == {kept}
    assert devices[0].try_upload(updates[1])[0] == 409
    assert set(world.stored("updates")) == {kept}
    devices[1].upload(updates[1])
    world.settle()
    (total,) = world.stored("updates")
    assert "/sum." in total
    # The sum has both: what is sent once more, because the answer was lost, changes nothing and stays nowhere.
    devices[0].upload(updates[0])
    assert set(world.stored("updates")) == {total}
    for device, data in zip(devices[2:], updates[2:]):
        device.upload(data)
    world.settle()
    assert devices[0].status().phase == "committed"


@pytest.mark.sampled(every=3)
def test_a_revoked_device_cannot_take_its_acknowledged_update_away(world: World) -> None:
    """A web process believes its session for some seconds more; the round counts on what was acknowledged."""
    task = world.create_task(privacy="plain", threshold=None, cohort=3)
    devices = world.add_devices(3)
    world.start_round(devices)
    for index, device in enumerate(devices):
        device.upload(encoded(update(index)))
    with world.services.database.write() as session:  # as another web process does it
        revoke(session, session.get_one(Device, devices[0].id), world.clock.now)
    status, answer = devices[0].try_upload(encoded(update(0)))
    assert status == 403, answer
    world.settle()
    same(parameters(world, task), mean([update(index) for index in range(3)]))
