"""Whole rounds over neighbours against the API: the sum is exact, and whoever leaves does not stop it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from archipel.bundle import read_weights
from archipel.protocol.secagg_plus import kem
from archipel.server.database.tables import Answer
from tests.support.devices import ANSWERED, Device
from tests.support.neighbour_devices import NeighbourDevice, add_devices, create_task
from tests.support.tiny_bundle import make_bundle
from tests.support.world import World

DELTA_STEP = 1 / 256


def mean_of(devices: Sequence[Device]) -> tuple[np.ndarray, np.ndarray]:
    """FedAvg from zero over updates of weight 1, computed from the plain integers."""
    vectors = np.array([device.vector for device in devices], np.int64)
    signed = np.where(vectors < 2**23, vectors, vectors - 2**24)
    mean = signed[:, :8].sum(axis=0) * DELTA_STEP / len(devices)
    return mean[:6].reshape(3, 2).astype(np.float32), mean[6:].astype(np.float32)


def finish(world: World, task: dict, devices: list[NeighbourDevice], gone: dict[str, list[int]]) -> dict:  # type: ignore[type-arg]
    """Run the round; `gone`: who sends nothing from a phase on. Returns the task."""
    alive = set(range(len(devices)))
    for phase in ANSWERED:
        alive -= set(gone.get(phase, []))
        for index in sorted(alive):
            devices[index].answer(phase)
        world.settle()
        if gone.get(phase):
            world.clock.now += task["deadlines"][phase] + 1
            world.settle()
    return world.task(task["task_id"])


@pytest.mark.parametrize(
    ("server", "gone", "survivors", "protocol"),
    [
        ("malicious", {}, range(10), "neighbours"),
        ("malicious", {"advertising": [9], "masking": [3]}, [0, 1, 2, 4, 5, 6, 7, 8], "neighbours-mlkem"),
        ("malicious", {"sharing": [0], "confirming": [5]}, range(1, 10), "neighbours"),
        ("malicious", {"unmasking": [2, 7]}, range(10), "neighbours"),
        ("semi-honest", {"complaining": [1], "masking": [4], "unmasking": [0]}, [0, 2, 3, 5, 6, 7, 8, 9], "neighbours"),
        ("semi-honest", {"masking": [4]}, [0, 1, 2, 3, 5, 6, 7, 8, 9], "neighbours-mlkem"),
    ],
)
@pytest.mark.sampled(every=6)
def test_the_new_parameters_are_the_exact_mean_of_the_survivors(
    world: World, tmp_path: Path, server: str, gone: dict[str, list[int]], survivors: list[int], protocol: str
) -> None:
    task, policy = create_task(world, tmp_path, server, protocol=protocol)
    assert task["protocol"] == protocol
    devices = add_devices(world, 10, policy)
    world.start_round(devices)
    assert devices[0].plan is not None
    assert (devices[0].plan.protocol, devices[0].plan.threshold) == (protocol, task["threshold"])
    after = finish(world, task, devices, gone)
    assert (after["state"], after["rounds_committed"]) == ("completed", 1), world.rounds(task["task_id"])
    status, data = world.operator("GET", f"/v1/blobs/{after['model']}")
    assert status == 200
    w, b = mean_of([devices[index] for index in survivors])
    parameters = read_weights(data)
    np.testing.assert_allclose(parameters["w"], w, rtol=1e-6)
    np.testing.assert_allclose(parameters["b"], b, rtol=1e-6)
    (info,) = world.rounds(task["task_id"])
    assert info["survivors"] == sorted(devices[index].id for index in survivors)
    # As of every round, nothing that devices sent is kept.
    with world.services.database.read() as session:
        assert all(row.body is None for row in session.query(Answer))


@pytest.mark.sampled(every=4)
def test_it_goes_on_after_kills_of_the_coordinator(world: World, tmp_path: Path) -> None:
    task, policy = create_task(world, tmp_path)
    devices = add_devices(world, 10, policy)
    world.start_round(devices)
    for phase in ANSWERED:
        for device in devices:
            device.answer(phase)
        world.restart_coordinator()
        world.settle()
    assert world.task(task["task_id"])["state"] == "completed"


@pytest.mark.sampled(every=4)
def test_too_few_that_answer_end_the_round_and_say_so(world: World, tmp_path: Path) -> None:
    task, policy = create_task(world, tmp_path)
    devices = add_devices(world, 10, policy)
    world.start_round(devices)
    after = finish(world, task, devices, {"unmasking": [0, 1, 2, 3, 4]})
    assert after["state"] == "running"
    (info,) = world.rounds(task["task_id"])
    assert info["phase"] == "failed"
    assert "secrets cannot be recovered" in info["reason"] or "needed" in info["reason"]


@pytest.mark.parametrize(
    ("protocol", "spoken", "what"),
    [
        ("neighbours", ("complete",), "rounds over neighbours"),
        ("neighbours-mlkem", ("complete", "neighbours"), "rounds over neighbours with ML-KEM"),
    ],
)
@pytest.mark.sampled(every=4)
def test_devices_that_speak_the_other_protocol_only_are_not_taken(
    world: World, tmp_path: Path, protocol: str, spoken: Any, what: str
) -> None:
    task, policy = create_task(world, tmp_path, min_cohort=10, protocol=protocol)
    devices = add_devices(world, 10, policy)
    devices[0].protocols = spoken
    for device in devices:
        assert device.check_in() is None
    world.settle()
    shown = world.task(task["task_id"])
    assert shown["waiting"] == 9
    assert f"1 waiting device cannot take part in {what}" in shown["waiting_for"].split("; ")
    devices[0].protocols = (*spoken, protocol)  # type: ignore[arg-type]
    assert devices[0].check_in() is None
    world.settle()
    assert all(device.join() for device in devices)


@pytest.mark.sampled(every=8)
def test_groups_over_neighbours(world: World, tmp_path: Path) -> None:
    """Each group is a round over neighbours of its own; the rule goes over their means."""
    task, policy = create_task(
        world, tmp_path, "semi-honest", cohort=24, secure_groups=3, aggregation={"rule": "median", "tolerated": 1}
    )
    devices = add_devices(world, 24, policy)
    world.start_round(devices)
    groups: dict[str, list[NeighbourDevice]] = {}
    for device in devices:
        assert device.plan is not None
        assert device.plan.max_cohort == 8
        groups.setdefault(device.plan.round_id, []).append(device)
    for phase in ANSWERED:
        for device in devices:
            device.answer(phase)
        world.settle()
    after = world.task(task["task_id"])
    assert after["state"] == "completed", world.rounds(task["task_id"])
    parameters = read_weights(world.operator("GET", f"/v1/blobs/{after['model']}")[1])
    means = [mean_of(group) for group in groups.values()]
    np.testing.assert_allclose(parameters["w"], np.median([w for w, _ in means], axis=0), rtol=1e-6)


@pytest.mark.sampled(every=4)
def test_an_asynchronous_task_over_neighbours(world: World, tmp_path: Path) -> None:
    task, policy = create_task(world, tmp_path, "semi-honest", cohort=8, concurrency=16, mode="asynchronous", rounds=2)
    devices = add_devices(world, 16, policy)
    world.start_round(devices)
    assert sorted(Counter(device.plan.round_id for device in devices if device.plan).values()) == [8, 8]
    for phase in ANSWERED:
        for device in devices:
            device.answer(phase)
        world.settle()
    after = world.task(task["task_id"])
    assert (after["state"], after["rounds_committed"]) == ("completed", 2), world.rounds(task["task_id"])


def test_a_server_without_ml_kem_refuses_the_task(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_task(world, tmp_path)
    monkeypatch.setattr(kem, "is_available", lambda: False)
    request = {"name": "digits", "population": "pupils", "rounds": 1, "min_cohort": 3, "cohort": 10}
    request |= {"bundle": world.publish(), "protocol": "neighbours-mlkem"}
    status, answer = world.operator("POST", "/v1/tasks", request)
    assert status == 422, answer
    assert "this server's cryptography has no ML-KEM-768" in answer["detail"]


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"protocol": "neighbours", "threshold": 3}, "threshold: 3; over neighbours it follows"),
        ({"protocol": "neighbours", "privacy": "plain"}, "of secure rounds"),
        ({"protocol": "neighbours", "kind": "evaluation", "metrics": {"loss": 1.0}}, "for trainings"),
        ({"protocol": "neighbours", "min_cohort": 2, "cohort": 2}, "from 3 to"),
    ],
)
@pytest.mark.sampled(every=6)
def test_tasks_that_cannot_be_over_neighbours(
    world: World, tmp_path: Path, settings: dict[str, object], why: str
) -> None:
    create_task(world, tmp_path)
    request = {"name": "digits", "population": "pupils", "rounds": 1, "min_cohort": 3, "cohort": 10, **settings}
    status, answer = world.operator("POST", "/v1/tasks", {"bundle": world.publish(), **request})
    assert status == 422, answer
    assert re.search(why, answer["detail"]), answer
    # And a bundle whose policy does not allow them.
    world.bundle_file = make_bundle(tmp_path, world.keys.publisher, name="other", policy={})
    request |= {"protocol": "neighbours", "kind": "training", "privacy": "secure", "threshold": None, "metrics": {}}
    status, answer = world.operator("POST", "/v1/tasks", {"bundle": world.publish(), **request})
    assert (status, "allows ['complete']" in answer["detail"]) == (422, True), answer
