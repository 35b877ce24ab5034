"""Whole secure rounds over the API, with real participants: the sum is exact, and nothing unmasked is stored."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from archipel.bundle import read_weights
from archipel.protocol.messages import Confirmations, Receipt, Unmasking
from tests.support.devices import Device
from tests.support.world import World

DELTA_STEP, WEIGHT_STEP = 1 / 256, 1 / 4096


def give_updates(devices: list[Device], weights: list[int]) -> list[np.ndarray]:
    """Every device gets a vector of small signed integers; returns them as int64, the last entry its weight."""
    generator = np.random.default_rng(7)
    updates = []
    for device, weight in zip(devices, weights, strict=True):
        update = np.append(generator.integers(-3000, 3000, 8), weight * 4096).astype(np.int64)
        assert device.plan is not None
        device.vector = (update % 2**device.plan.modulus_bits).astype(np.uint32)
        updates.append(update)
    return updates


def expected_parameters(updates: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """FedAvg from zero, computed from the plain integers."""
    total = np.sum(updates, axis=0)
    mean = total[:8] * DELTA_STEP / (total[8] * WEIGHT_STEP)
    return mean[:6].reshape(3, 2).astype(np.float32), mean[6:].astype(np.float32)


def new_parameters(world: World, task: dict[str, Any]) -> dict[str, np.ndarray]:
    status, data = world.operator("GET", f"/v1/blobs/{world.task(task['task_id'])['model']}")
    assert status == 200
    return read_weights(data)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(
    ("vanish_before", "survivors"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"advertising": [4]}, [0, 1, 2, 3]),
        ({"sharing": [4]}, [0, 1, 2, 3]),
        ({"masking": [1, 3]}, [0, 2, 4]),
        ({"confirming": [4]}, [0, 1, 2, 3, 4]),
        ({"unmasking": [1, 3]}, [0, 1, 2, 3, 4]),
        ({"sharing": [0], "masking": [1], "unmasking": []}, [2, 3, 4]),
    ],
)
def test_the_new_parameters_are_the_exact_mean_of_the_survivors(
    world: World, vanish_before: dict[str, list[int]], survivors: list[int]
) -> None:
    task = world.create_task()
    devices = world.add_devices(5)
    world.start_round(devices)
    updates = give_updates(devices, [1, 2, 1, 3, 1])
    alive = set(range(5))
    for phase in ("advertising", "sharing", "complaining", "masking", "confirming", "unmasking"):
        alive -= set(vanish_before.get(phase, []))
        for index in sorted(alive):
            devices[index].answer(phase)
        world.settle()
        if vanish_before.get(phase):
            # Not all have answered: the phase goes on until its deadline.
            world.clock.now += task["deadlines"][phase] + 1
            world.settle()
    after = world.task(task["task_id"])
    assert (after["state"], after["rounds_committed"]) == ("completed", 1), world.rounds(task["task_id"])
    w, b = expected_parameters([updates[index] for index in survivors])
    parameters = new_parameters(world, task)
    np.testing.assert_array_equal(parameters["w"], w)
    np.testing.assert_array_equal(parameters["b"], b)
    (info,) = world.rounds(task["task_id"])
    assert info["survivors"] == sorted(devices[index].id for index in survivors)
    assert info["weight_sum"] == sum([1, 2, 1, 3, 1][index] for index in survivors)
    assert info["weights_out"] == after["model"] != info["weights_in"]


@pytest.mark.sampled(every=3)
def test_rounds_build_on_each_other(world: World) -> None:
    task = world.create_task(rounds=3)
    devices = world.add_devices(5)
    w = np.zeros((3, 2), np.float32)
    for number in (1, 2, 3):
        world.start_round(devices)
        assert devices[0].plan.number == number
        updates = give_updates(devices, [1, 1, 1, 1, 0])
        world.run_to("unmasking", devices)
        for device in devices:
            device.unmasking()
        world.settle()
        w = w + expected_parameters(updates)[0]
        np.testing.assert_array_equal(new_parameters(world, task)["w"], w)
    assert world.task(task["task_id"])["state"] == "completed"
    # A completed task opens no further round.
    assert all(device.check_in() is None for device in devices)
    world.settle()
    assert len(world.rounds(task["task_id"])) == 3


@pytest.mark.sampled(every=3)
def test_nothing_unmasked_is_stored(world: World) -> None:
    world.create_task()
    devices = world.add_devices(5)
    world.start_round(devices)
    updates = give_updates(devices, [1, 1, 1, 1, 1])
    world.run_to("confirming", devices)
    folder = world.settings.path("")
    spooled = world.stored("updates")
    assert sorted(name.split("/")[1].split(".")[0] for name in spooled) == sorted(device.id for device in devices)
    stored = [*spooled.values(), *(path.read_bytes() for path in folder.rglob("*") if path.is_file())]
    for device, update in zip(devices, updates, strict=True):
        width = device.plan.modulus_bits // 8
        plain = b"".join(int(entry % 256**width).to_bytes(width, "little") for entry in update)
        assert any(data == device.masked for data in spooled.values())
        for data in stored:
            assert plain not in data
            assert device.vector.tobytes() not in data


@pytest.mark.sampled(every=3)
def test_spool_and_messages_are_gone_after_the_round(world: World) -> None:
    world.create_task()
    devices = world.add_devices(5)
    world.start_round(devices)
    world.run_to("unmasking", devices)
    for device in devices:
        device.unmasking()
    world.settle()
    assert world.stored("updates") == {}
    with world.services.database.engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM shares").scalar() == 0
        assert connection.exec_driver_sql("SELECT count(*) FROM answers WHERE body IS NOT NULL").scalar() == 0
        assert connection.exec_driver_sql("SELECT count(*) FROM check_ins WHERE round_id IS NOT NULL").scalar() == 0


@pytest.mark.sampled(every=3)
def test_the_masking_phase_ends_at_its_goal(world: World) -> None:
    task = world.create_task(goal=4)
    devices = world.add_devices(5)
    world.start_round(devices)
    give_updates(devices, [1] * 5)
    world.run_to("masking", devices)
    for device in devices[:3]:
        device.masking()
    world.settle()
    assert devices[0].status().phase == "masking"
    devices[3].masking()
    world.settle()
    assert devices[0].status().phase == "confirming"
    for phase in ("confirming", "unmasking"):
        for device in devices[:4]:
            device.answer(phase)
        world.settle()
    assert world.task(task["task_id"])["state"] == "completed"


@pytest.mark.sampled(every=3)
def test_a_device_that_reveals_wrong_shares_is_left_out(world: World) -> None:
    task = world.create_task()
    devices = world.add_devices(5)
    world.start_round(devices)
    updates = give_updates(devices, [1, 2, 1, 3, 1])
    world.run_to("unmasking", devices)
    liar = devices[2]
    confirmations = liar.ask("GET", f"{liar.round}/confirmations", Confirmations)
    honest = liar.participant.unmask(confirmations)
    first, second, *others = honest.self_seeds
    swapped = [
        msgspec.structs.replace(first, share=second.share),
        msgspec.structs.replace(second, share=first.share),
        *others,
    ]
    liar.ask("PUT", f"{liar.round}/unmasking", Receipt, Unmasking(self_seeds=swapped, mask_keys=honest.mask_keys))
    for device in devices:
        if device is not liar:
            device.unmasking()
    world.settle()
    assert world.task(task["task_id"])["state"] == "completed"
    np.testing.assert_array_equal(new_parameters(world, task)["w"], expected_parameters(updates)[0])


@pytest.mark.sampled(every=3)
def test_an_update_that_is_damaged_on_disk_fails_the_round_closed(world: World) -> None:
    task = world.create_task()
    devices = world.add_devices(5)
    world.start_round(devices)
    world.run_to("unmasking", devices)
    (spooled,) = (name for name in world.stored("updates") if devices[0].id in name)
    world.damage(f"updates/{spooled}")
    for device in devices:
        device.unmasking()
    world.settle()
    (info,) = world.rounds(task["task_id"])
    assert info["phase"] == "failed"
    assert "differ from the acknowledged ones" in info["reason"]
    assert world.task(task["task_id"])["model"] == info["weights_in"]
