"""The coordinator: when rounds open, who is in them, and that it may die at any time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import numpy as np
import pytest

from archipel.errors import ServerError
from archipel.protocol.messages import CheckIn
from archipel.server.database.tables import CheckInRow
from archipel.server.processes import children
from archipel.server.processes.coordinator_process import run_coordinator
from archipel.server.rounds.aggregation import aggregate
from tests.support.devices import Device
from tests.support.world import World

COLLECTING = ("advertising", "sharing", "complaining", "masking", "confirming", "unmasking")


def set_updates(devices: list[Device]) -> np.ndarray:
    """One device after the other: constant vectors 1, 2, 3, ...; returns w after one round."""
    for number, device in enumerate(devices, start=1):
        device.vector = np.full(9, number * 256, np.uint32)
        device.vector[8] = 4096
    mean = sum(range(1, len(devices) + 1)) / len(devices)
    return np.full((3, 2), mean, np.float32)


def weights(world: World, task_id: str) -> np.ndarray:
    from archipel.bundle import read_weights

    status, data = world.operator("GET", f"/v1/blobs/{world.task(task_id)['model']}")
    assert status == 200
    return read_weights(data)["w"]


@pytest.mark.parametrize("moment", ["at its start", "half way", "at its end"])
@pytest.mark.sampled(every=4)
def test_a_coordinator_that_loses_its_memory_in_every_phase_goes_on(world: World, moment: str) -> None:
    task = world.create_task()
    devices = world.add_devices(4)
    world.start_round_at_deadline(devices)
    expected = set_updates(devices)
    for name in COLLECTING:
        if moment == "at its start":
            world.restart_coordinator()
        for index, device in enumerate(devices):
            device.answer(name)
            if moment == "half way" and index == 1:
                world.restart_coordinator()
                world.settle()
        if moment == "at its end":
            world.restart_coordinator()
        world.settle()
    assert world.task(task["task_id"])["state"] == "completed"
    np.testing.assert_array_equal(weights(world, task["task_id"]), expected)


@pytest.mark.sampled(every=3)
def test_aggregating_twice_gives_one_version(world: World) -> None:
    task = world.create_task()
    devices = world.add_devices(5)
    world.start_round(devices)
    expected = set_updates(devices)
    world.run_to("unmasking", devices)
    for device in devices:
        device.unmasking()
    assert world.coordinator.step()
    # Killed after the new weights were written and before they were committed.
    written = aggregate(world.services, devices[0].plan.round_id).version
    assert written is not None
    world.restart_coordinator()
    world.settle()
    after = world.task(task["task_id"])
    assert (after["model"], after["rounds_committed"]) == (written.weights, 1)
    np.testing.assert_array_equal(weights(world, task["task_id"]), expected)
    # Killed after the commit and before the spool was emptied.
    world.services.spool.open_round(devices[0].plan.round_id)
    world.restart_coordinator()
    assert world.stored("updates") == {}


@pytest.mark.sampled(every=4)
def test_a_spooled_file_without_acknowledgement_does_not_count(world: World) -> None:
    task = world.create_task()
    devices = world.add_devices(5)
    world.start_round(devices)
    set_updates(devices)
    world.run_to("masking", devices)
    # A web process died between the file and the row.
    spool = world.services.spool
    written = spool.receive(devices[4].plan.round_id, [b"\x01" * 27])
    spool.keep(devices[4].plan.round_id, devices[4].id, written)
    for device in devices[:4]:
        device.masking()
    world.clock.now += 61
    world.settle()
    for name in ("confirming", "unmasking"):
        for device in devices[:4]:
            device.answer(name)
        world.settle()
    assert world.task(task["task_id"])["state"] == "completed"
    np.testing.assert_array_equal(weights(world, task["task_id"]), np.full((3, 2), 2.5, np.float32))


@pytest.mark.sampled(every=3)
def test_no_round_without_enough_devices(world: World) -> None:
    task = world.create_task(min_cohort=3)
    devices = world.add_devices(3)
    for device in devices[:2]:
        device.check_in()
    world.settle()
    assert world.rounds(task["task_id"]) == []
    assert world.task(task["task_id"])["waiting"] == 2
    # The third comes when the first two are long gone.
    world.clock.now += 13
    devices[2].check_in()
    world.settle()
    assert world.rounds(task["task_id"]) == []
    assert world.task(task["task_id"])["waiting"] == 1


def test_what_a_waiting_device_tells_is_kept_and_bounded(world: World) -> None:
    (device,) = world.add_devices(1)
    told = {"ram": 512, "charging": True, "app": "1.4"}
    assert device.call("POST", "/v1/check-ins", CheckIn(attributes=told))[0] == 200
    assert device.call("POST", "/v1/check-ins", CheckIn(attributes=told | {"ram": 256}))[0] == 200
    with world.services.database.read() as session:
        assert session.get_one(CheckInRow, device.id).attributes == told | {"ram": 256}
    status, answer = device.call("POST", "/v1/check-ins", CheckIn(attributes={"x": "y" * 20_000}))
    assert status == 413, answer


@pytest.mark.sampled(every=3)
def test_polling_writes_a_few_times_per_window_only(world: World) -> None:
    (device,) = world.add_devices(1)
    seen = set()
    for _ in range(100):
        device.check_in()
        with world.services.database.read() as session:
            seen.add(session.get_one(CheckInRow, device.id).last_seen)
        world.clock.now += 0.1
    assert len(seen) == 3  # at 0, 4 and 8 s: 2.5 times in the window of 10 s


@pytest.mark.sampled(every=4)
def test_only_the_cohort_is_assigned_and_chosen_at_random(world: World) -> None:
    world.create_task(cohort=3, rounds=100)
    devices = world.add_devices(12)
    chosen = set()
    for _ in range(4):
        for device in devices:
            device.check_in()
        world.settle()
        taken = [device for device in devices if device.join()]
        assert len(taken) == 3
        # The others wait, those assigned get the same plan again.
        assert taken[0].check_in() is not None
        chosen.add(tuple(device.id for device in taken))
        world.clock.now += 121
        world.settle()
    # 220 possible cohorts: four equal ones happen once in ten million times.
    assert len(chosen) > 1


@pytest.mark.sampled(every=3)
def test_a_device_is_in_one_live_round_at_a_time(world: World) -> None:
    bundle = world.publish()
    first, second = world.create_task(bundle=bundle, name="a"), world.create_task(bundle=bundle, name="b")
    devices = world.add_devices(5)
    world.start_round(devices)
    for device in devices:
        device.check_in()
    world.settle()
    rounds = world.rounds(first["task_id"]) + world.rounds(second["task_id"])
    assert len([info for info in rounds if info["participants"]]) == 1


@pytest.mark.sampled(every=3)
def test_a_device_that_dropped_out_is_not_sent_the_plan_again(world: World) -> None:
    world.create_task()
    devices = world.add_devices(5)
    world.start_round(devices)
    world.run_to("sharing", devices)
    for device in devices[:4]:
        device.sharing()
    world.clock.now += 61
    world.settle()
    assert devices[4].check_in() is None
    assert all(device.check_in() is not None for device in devices[:4])
    for name in ("complaining", "masking", "confirming"):
        for device in devices[:4]:
            device.answer(name)
        world.settle()
    devices[0].unmasking()
    # Done, and waiting for the others: nothing left to do with the plan.
    assert devices[0].check_in() is None
    assert devices[1].check_in() is not None


@pytest.mark.sampled(every=6)
def test_a_task_fails_after_too_many_failed_rounds(world: World) -> None:
    task = world.create_task()
    devices = world.add_devices(5)
    for attempt in range(1, world.settings.max_failed_rounds + 1):
        world.start_round(devices)
        world.clock.now += 121
        world.settle()
        assert world.task(task["task_id"])["failed_rounds"] == attempt
    after = world.task(task["task_id"])
    assert after["state"] == "failed"
    assert "5 rounds in a row failed; the last one: 0 devices advertised keys" in after["reason"]
    for device in devices:
        device.check_in()
    world.settle()
    assert len(world.rounds(task["task_id"])) == world.settings.max_failed_rounds


@pytest.mark.parametrize("phase", COLLECTING)
@pytest.mark.sampled(every=6)
def test_cancelling_fails_the_live_round(world: World, phase: str) -> None:
    task = world.create_task()
    devices = world.add_devices(5)
    world.start_round(devices)
    world.run_to(phase, devices)
    status, answer = world.operator("POST", f"/v1/tasks/{task['task_id']}/cancel")
    assert (status, answer["state"]) == (200, "cancelled")
    world.settle()
    (info,) = world.rounds(task["task_id"])
    assert (info["phase"], info["reason"]) == ("failed", "the task is cancelled")
    assert world.operator("POST", f"/v1/tasks/{task['task_id']}/cancel")[1]["state"] == "cancelled"
    assert world.task(task["task_id"])["failed_rounds"] == 0


@pytest.mark.sampled(every=4)
def test_only_one_coordinator_per_data_folder(coordinator_process: CoordinatorProcess, world: World) -> None:
    coordinator_process.start()
    with pytest.raises(ServerError, match="another server is running on this data folder"):
        run_coordinator(world.settings)
    coordinator_process.stop(signal.SIGTERM)
    assert coordinator_process.process is not None
    assert coordinator_process.process.returncode == 0


class CoordinatorProcess:
    """The coordinator as the supervisor starts it: a process to be killed."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        ready, told = os.pipe()
        environment = children.child_environment(self.world.settings) | {children.READY_FD: str(told)}
        command = [sys.executable, "-m", "archipel.server.processes.coordinator_process"]
        with open(self.world.settings.process_log, "ab") as log:
            self.process = subprocess.Popen(command, env=environment, pass_fds=[told], stdout=log, stderr=log)
        os.close(told)
        assert os.read(ready, 1) == b"1", self.world.settings.process_log.read_text()
        os.close(ready)

    def stop(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)
        self.process.wait(10)

    def wait_for(self, phase: str, device: Device) -> None:
        deadline = time.monotonic() + 10
        while device.status().phase != phase:
            assert time.monotonic() < deadline, (phase, device.status())
            time.sleep(0.01)


@pytest.fixture
def coordinator_process(world: World) -> Iterator[CoordinatorProcess]:
    made = CoordinatorProcess(world)
    yield made
    if made.process is not None and made.process.poll() is None:
        made.stop(signal.SIGKILL)


@pytest.mark.sampled(every=8)
def test_a_coordinator_killed_in_every_phase_of_one_round(
    coordinator_process: CoordinatorProcess, world: World
) -> None:
    """kill -9 in every phase, with the other half of the answers arriving while there is no coordinator."""
    world.clock.now = time.time()
    task = world.create_task()
    devices = world.add_devices(5)
    for device in devices:
        device.check_in()
    coordinator_process.start()
    deadline = time.monotonic() + 10
    while not all(device.plan or device.join() for device in devices):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    expected = set_updates(devices)
    for name in COLLECTING:
        coordinator_process.wait_for(name, devices[0])
        for device in devices[:3]:
            device.answer(name)
        coordinator_process.stop(signal.SIGKILL)
        for device in devices[3:]:
            device.answer(name)
        assert devices[0].status().phase == name
        coordinator_process.start()
    coordinator_process.wait_for("committed", devices[0])
    assert world.task(task["task_id"])["state"] == "completed"
    np.testing.assert_array_equal(weights(world, task["task_id"]), expected)
