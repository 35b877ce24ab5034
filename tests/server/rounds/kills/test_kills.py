"""Killed at any durable point, the server ends every round with the sum of the updates that it acknowledged."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from archipel.bundle import read_weights
from archipel.protocol.messages import LeaveRequest
from archipel.protocol.operator.access import AuditEntry
from archipel.protocol.uploads import metric_arrays
from archipel.server.audit.chain import verify
from archipel.server.database.fault_tables import Rest, Search, Suspect
from archipel.server.database.privacy_tables import PrivacyEvent
from archipel.server.database.tables import Round
from tests.attacks.faults_world import upload_noise
from tests.server.rounds.neighbours.test_round import mean_of
from tests.server.rounds.noisy import equal_weights, give_equal, model_of
from tests.server.rounds.test_plain_rounds import mean, update
from tests.server.rounds.test_robust_rounds import clipped, rows
from tests.server.rounds.test_root_devices import alike, fltrust
from tests.server.rounds.test_secure_groups import give, group_means
from tests.server.rounds.test_secure_round import expected_parameters, give_updates
from tests.support.devices import ANSWERED, Device
from tests.support.killed_server import Died, Server
from tests.support.neighbour_devices import add_devices, use_bundle
from tests.support.world import World


class Through:
    """A world whose server is another process; what is asked of it is asked again when that dies."""

    def __init__(self, world: World, kill: int, devices: int, *, equal: bool = False, neighbours: bool = False) -> None:
        self.world, folder = world, Path(world.settings.folder).parent
        if equal:
            equal_weights(world, folder / "equal")
        policy = use_bundle(world, folder) if neighbours else None
        world.publish()
        self.bundle = world.publish()
        self.devices: Sequence[Device] = (
            world.add_devices(devices) if policy is None else add_devices(world, devices, policy)
        )
        for services in (world.services, world.app.extensions["archipel"]):
            services.database.dispose()  # no connection goes through a fork
        self.server = Server(world.settings, kill)
        world.transport = self.request
        for device in self.devices:
            device.transport = self.request

    def ask(self, *what: object) -> Any:
        try:
            return self.server.ask(self.world.clock.now, *what)
        except Died:
            return self.server.ask(self.world.clock.now, *what)

    def request(self, method: str, path: str, body: bytes | None, headers: dict[str, str]) -> tuple[int, bytes]:
        status, answer = self.ask("request", method, path, body, headers)
        return status, answer

    def settle(self) -> None:
        for _ in range(60):
            if not self.ask("step"):
                return
        raise AssertionError("the coordinator does not come to rest")

    def create(self, **settings: Any) -> str:
        values = {
            "name": "digits", "population": "pupils", "rounds": 1, "min_cohort": 3, "cohort": 3,
            "bundle": self.bundle, **settings,
        }  # fmt: skip
        status, answer = self.world.operator("POST", "/v1/tasks", values, {"Idempotency-Key": "0123456789abcdef"})
        assert status in (200, 201), answer
        return str(answer["task_id"])

    def join(self, devices: Sequence[Device] | None = None) -> None:
        waiting = list(self.devices if devices is None else devices)
        for _ in range(20):
            waiting = [device for device in waiting if not device.join()]
            if not waiting:
                return
            self.settle()
        raise AssertionError("no round takes the devices")


def secure(through: Through) -> None:
    task = through.create(threshold=3)
    through.join()
    updates = give_updates(through.devices, [1, 2, 1])
    for phase in ANSWERED:
        for device in through.devices:
            device.answer(phase)
            through.settle()
    w, b = expected_parameters(updates)
    check(through, task, {"w": w, "b": b})


def over_neighbours(through: Through) -> None:
    """One of five leaves when it has dealt, so that its masks have to be taken out."""
    task = through.create(protocol="neighbours", cohort=5)
    through.join()
    alive = list(through.devices)
    for phase in ANSWERED:
        alive = alive[1:] if phase == "masking" else alive
        for device in alive:
            device.answer(phase)
            through.settle()
        if phase == "masking":
            through.world.clock.now += 61
            through.settle()
    w, b = mean_of(alive)
    check(through, task, {"w": w, "b": b})


def noisy(through: Through) -> None:
    """What is released is paid for once, or twice where a kill had the round aggregated again; never not at all."""
    noise = {"mechanism": "central", "noise_multiplier": 1e-4}
    task = through.create(threshold=3, differential_privacy=noise, rounds=2)
    expected = np.zeros(8)
    for seed in (1, 2):
        through.join()
        expected += give_equal(through.devices, seed) / 256 / 3
        for phase in ANSWERED:
            for device in through.devices:
                device.answer(phase)
                through.settle()
    with through.world.coordinator._services.database.read() as session:
        charged = Counter(row.round_id for row in session.query(PrivacyEvent))
        committed = {row.round_id for row in session.query(Round).filter_by(phase="committed")}
    assert set(charged) == committed
    assert len(committed) == 2
    assert sorted(charged.values()) in ([[1, 1]] if not through.server.died else [[1, 1], [1, 2]])
    shown = through.world.task(task)["privacy_spent"]
    assert shown["releases"] == sum(charged.values())
    # The noise has a deviation of 3 steps of 1 / 256 in the sum, so of two means of three 0.0055.
    np.testing.assert_allclose(model_of(through.world, task), expected, atol=8 * 0.0055)
    check(through, task, None, versions=2)


def correlated(through: Through) -> None:
    """Each round has one noise, which is paid for once, whatever it is interrupted by."""
    noise = {"mechanism": "correlated", "noise_multiplier": 1e-4, "separation": 2, "coefficients": [2, 1]}
    task = through.create(threshold=3, differential_privacy=noise, rounds=2)
    expected = np.zeros(8)
    for seed, devices in enumerate((through.devices[:3], through.devices[3:])):
        through.join(devices)
        expected += give_equal(devices, seed) / 256 / 3
        for phase in ANSWERED:
            for device in devices:
                device.answer(phase)
                through.settle()
    with through.world.coordinator._services.database.read() as session:
        rows = session.query(PrivacyEvent).all()
        committed = {row.round_id for row in session.query(Round).filter_by(phase="committed")}
    assert {row.round_id for row in rows} == committed
    assert len({row.noise for row in rows}) == len(rows) == 2
    # A draw has a deviation of 3 steps of 1 / 256, and the second round takes back half of the first one's.
    np.testing.assert_allclose(model_of(through.world, task), expected, atol=8 * 3 * (1 + 0.25) ** 0.5 / 256 / 3)
    check(through, task, None, versions=2)


def plain(through: Through) -> None:
    task = through.create(privacy="plain")
    through.join()
    updates = [update(index, 1.0 + index) for index in range(3)]
    for device, values in zip(through.devices, updates, strict=True):
        device.updating(**values)
        through.settle()
    check(through, task, mean(updates))


def robust(through: Through) -> None:
    """The rule keeps an aggregate for the next round."""
    task = through.create(privacy="plain", aggregation={"rule": "centered-clipping", "tolerated": 1}, rounds=2)
    expected, centre = {"w": np.zeros((3, 2)), "b": np.zeros(2)}, None
    for number in range(2):
        through.join()
        updates = [update(10 * number + index, 1.0 + index) for index in range(3)]
        for device, values in zip(through.devices, updates, strict=True):
            device.updating(**values)
            through.settle()
        centre = clipped(rows(updates), centre)
        expected = {name: expected[name] + centre[name] for name in centre}
    check(through, task, expected, versions=2)


def rooted(through: Through) -> None:
    """The first device's update is what the others are compared with."""
    rule = {"rule": "fltrust", "root": through.devices[0].id}
    task = through.create(privacy="plain", aggregation=rule)
    through.join()
    updates = [alike(index, 1.0 + index) for index in range(4)]
    for device, values in zip(through.devices, updates, strict=True):
        device.updating(**values)
        through.settle()
    check(through, task, fltrust(updates[1:], updates[0]))


def grouped(through: Through) -> None:
    """Three groups; one of them never sends its updates and is left out."""
    asked = {"rule": "trimmed-mean", "tolerated": 0}
    task = through.create(threshold=2, cohort=9, secure_groups=3, aggregation=asked)
    through.join()
    updates = give(through.devices, [1, 2, 1, 1, 1, 3, 1, 1, 2])
    groups: dict[str, list[Device]] = {}
    for device in through.devices:
        assert device.plan is not None
        groups.setdefault(device.plan.round_id, []).append(device)
    silent = list(groups.values())[1]
    for phase in ANSWERED:
        for device in through.devices:
            if phase in ANSWERED[:3] or device not in silent:
                device.answer(phase)
        through.settle()
    through.world.clock.now += 61
    through.settle()
    means = group_means(updates, [group for group in groups.values() if group is not silent])
    check(through, task, {name: each.mean(axis=0) for name, each in means.items()}, committed=2)


def buffered(through: Through) -> None:
    task = through.create(privacy="plain", mode="asynchronous", concurrency=6, rounds=2)
    through.join()
    updates = [update(index, 1.0 + index) for index in range(6)]
    for device, values in zip(through.devices, updates, strict=True):
        device.updating(**values)
        through.settle()
    old, new = mean(updates[:3]), mean(updates[3:], [2**-0.5] * 3)
    check(through, task, {name: old[name] + new[name] for name in old}, versions=2)


def evaluated(through: Through) -> None:
    ranges = {"loss": 8.0}
    task = through.create(kind="evaluation", metrics=ranges, privacy="plain")
    through.join()
    for index, device in enumerate(through.devices):
        device.updating(**metric_arrays({"loss": index}, ranges, 10 * (index + 1), 1000))
        through.settle()
    [shown] = [row for row in through.world.rounds(task) if row["phase"] == "committed"]
    assert shown["result"]["metrics"]["loss"] == pytest.approx((0 * 10 + 1 * 20 + 2 * 30) / 60, rel=1e-6)
    check(through, task, None)


def spoiled(through: Through) -> None:
    """A device sends random numbers in the first round, and none in the second."""
    task = through.create(threshold=3)
    for round_number in (1, 2):
        through.join()
        updates = give_updates(through.devices, [1, 2, 1])
        for phase in ANSWERED:
            for device in through.devices:
                if (round_number, phase, device) == (1, "masking", through.devices[0]):
                    upload_noise(device)
                else:
                    device.answer(phase)
                through.settle()
    w, b = expected_parameters(updates)
    check(through, task, {"w": w, "b": b})
    # Each round is counted once, whatever was done twice.
    with through.world.coordinator._services.database.read() as session:
        search = session.get_one(Search, "pupils")
        assert (search.rounds, search.spoiled, search.quiet) == (2, 1, 1)
        counted = {(row.rounds, row.spoiled) for row in session.query(Suspect)}
        assert counted == {(2, 1)}
        assert [row.spoiled for row in session.query(Round).filter_by(phase="failed")] == [True]


def left(through: Through) -> None:
    """A device leaves, so the first round ends; it rests, and is in the second one."""
    task = through.create(privacy="plain")
    through.join()
    gone = through.devices[0]
    assert gone.call("POST", f"{gone.round}/leave", LeaveRequest(reason="size"))[0] == 200
    through.settle()
    assert through.world.task(task)["refused"] == {"size": 1}
    through.world.clock.now += through.world.settings.leave_seconds
    through.join()
    updates = [update(index, 1.0 + index) for index in range(3)]
    for device, values in zip(through.devices, updates, strict=True):
        device.updating(**values)
        through.settle()
    with through.world.coordinator._services.database.read() as session:
        assert session.query(Rest).all() == []
    check(through, task, mean(updates))


SCENARIOS: dict[str, Callable[[Through], None]] = {
    "secure": secure, "neighbours": over_neighbours, "noisy": noisy, "correlated": correlated, "plain": plain,
    "robust": robust, "rooted": rooted, "grouped": grouped, "buffered": buffered, "evaluated": evaluated,
    "spoiled": spoiled, "left": left,
}  # fmt: skip


def check(
    through: Through, task_id: str, expected: dict[str, np.ndarray] | None, versions: int = 1, committed: int = 0
) -> None:
    world = through.world
    task = world.task(task_id)
    assert (task["state"], task["rounds_committed"]) == ("completed", versions), task
    if expected is not None:
        status, data = world.operator("GET", f"/v1/blobs/{task['model']}")
        assert status == 200
        for name, array in read_weights(data).items():
            np.testing.assert_allclose(array, expected[name], rtol=1e-6, atol=1e-7)
    entries = msgspec.convert(world.operator("GET", "/v1/audit")[1]["items"], list[AuditEntry])
    assert verify(entries)[0] == len(entries)
    for name in ("task.create", "round.committed"):
        assert sum(entry.action == name for entry in entries) == (1 if name == "task.create" else committed or versions)
    through.server.close()
    world.restart_coordinator()
    with world.services.database.read() as session:
        assert all(row.ended is not None for row in session.query(Round).filter_by(task_id=task_id))
    assert world.stored("updates") == {}, "left-over updates"


def run(world: World, scenario: str, kill: int) -> Server:
    through = Through(
        world, kill, {"buffered": 6, "correlated": 6, "grouped": 9, "neighbours": 5, "rooted": 4}.get(scenario, 3),
        equal=scenario in ("noisy", "correlated"), neighbours=scenario == "neighbours",
    )  # fmt: skip
    try:
        SCENARIOS[scenario](through)
    except BaseException:
        os.kill(through.server._process, 9)
        raise
    return through.server


POINTS = {
    "secure": 175,
    "neighbours": 240,
    "noisy": 330,
    "correlated": 320,
    "plain": 125,
    "robust": 200,
    "rooted": 140,
    "grouped": 320,
    "buffered": 275,
    "evaluated": 115,
    "spoiled": 290,
    "left": 170,
}
"""More than each scenario has; a kill beyond the last one kills nobody."""


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.sampled(every=12)
def test_the_points_are_fewer_than_counted_for(world: World, scenario: str) -> None:
    server = run(world, scenario, 0)
    assert 0.8 * POINTS[scenario] < server.points < POINTS[scenario], (scenario, server.points)


@pytest.mark.sampled(every=3088)
@pytest.mark.parametrize(("scenario", "kill"), [(name, kill) for name in SCENARIOS for kill in range(1, POINTS[name])])
def test_killed_at_any_point_it_loses_and_doubles_nothing(world: World, scenario: str, kill: int) -> None:
    server = run(world, scenario, kill)
    assert server.died or server.points < kill
