"""A server with something on every page of its dashboard: rounds of real devices of the protocol, models, a rollout."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from archipel.bundle import CardMetric, ModelCard
from archipel.protocol.messages import Bins
from archipel.protocol.uploads import metric_arrays
from archipel.server.processes.lease import Lease
from tests.support.devices import POPULATION, Device
from tests.support.fleet import MODEL, Fleet
from tests.support.tiny_bundle import make_bundle
from tests.support.world import World

RANGES = {"loss": 8.0, "accuracy": 1.0}
DEVICES = 11
CARD = ModelCard(
    name="digits", description="Digits on pictures of 28 x 28.", task="image classification",
    intended_use="Reading digits on the device.", limits="Letters are taken for digits.",
    metrics=(CardMetric(name="accuracy", value=0.912, data="MNIST test", examples=10000),), licence="Apache-2.0",
)  # fmt: skip
"""Of the bundle of the first version."""


def fill_server(world: World, rounds: int) -> dict[str, str]:
    """Make everything; returns the paths of pages by what they show."""
    devices = world.add_devices(DEVICES)
    file = make_bundle(world.settings.path("."), world.keys.publisher, name="digits", card=CARD)
    status, made = world.operator("POST", "/v1/bundles", file.read_bytes())
    assert status == 201, made
    training = _train(world, devices, made["digest"], rounds)
    fleet = Fleet(world).create(0, promote=None)
    fleet.post(f"models/{MODEL}/versions", {"bundle": made["digest"]}, 201)
    for number in range(1, rounds + 1):
        fleet.post(f"models/{MODEL}/versions", {"task_id": training, "task_version": number, "parent": number}, 201)
    fleet.promote(1)
    if rounds > 1:
        fleet.promote(2)
    rejected = fleet.add_version()["number"]
    fleet.post(f"models/{MODEL}/versions/{rejected}/reject", {"reason": "it forgets sevens"})
    rollout = fleet.begin(version=rounds + 1)
    world.operator("POST", f"/v1/devices/{devices[0].id}/revoke")
    failed = _fail(world, devices[1:6])
    running = world.create_task(name="night-shift", rounds=40, cohort=5, hyperparameters={"lr": 0.05})
    for device in devices[1:6]:
        device.open_session()
    world.start_round(devices[1:6])
    world.run_to("masking", devices[1:6])
    # As its coordinator would, if it ran in a process of its own.
    assert Lease(world.services.database, "0" * 32, clock=world.clock, seconds=world.settings.lease_seconds).take()
    (live,) = world.rounds(running["task_id"])
    return {
        "overview": "/dashboard/",
        "populations": "/dashboard/populations",
        "population": f"/dashboard/populations/{POPULATION}",
        "devices": "/dashboard/devices",
        "device": f"/dashboard/devices/{devices[0].id}",
        "tasks": "/dashboard/tasks",
        "task": f"/dashboard/tasks/{training}",
        "failed-task": f"/dashboard/tasks/{failed}",
        "round": f"/dashboard/rounds/{live['round_id']}",
        "models": "/dashboard/models",
        "model": f"/dashboard/models/{MODEL}",
        "version": f"/dashboard/models/{MODEL}/versions/1",
        "compare": f"/dashboard/models/{MODEL}/compare?versions=1,2,3",
        "inside": f"/dashboard/models/{MODEL}/versions/2/insight?with=1",
        "inside-task": f"/dashboard/tasks/{training}/insight",
        "bundles": "/dashboard/bundles",
        "bundle": f"/dashboard/bundles/{world.publish()}",
        "upload": "/dashboard/bundles/upload",
        "rollouts": "/dashboard/rollouts",
        "rollout": f"/dashboard/rollouts/{rollout['rollout_id']}",
        "audit": "/dashboard/audit",
        "new-task": "/dashboard/tasks/new",
        "new-model": "/dashboard/new-model",
        "register": f"/dashboard/models/{MODEL}/register",
        "roll-out": f"/dashboard/models/{MODEL}/versions/2/rollout",
        "cancel": f"/dashboard/tasks/{running['task_id']}/cancel",
        "reject": f"/dashboard/models/{MODEL}/versions/1/reject",
    }


def _train(world: World, devices: list[Device], bundle: str, rounds: int) -> str:
    """A training whose versions are evaluated: with each round the loss falls, on some devices less."""
    task = world.create_task(
        name="spring", bundle=bundle, rounds=rounds, evaluate_every=1, privacy="plain", threshold=None, cohort=DEVICES,
        min_cohort=DEVICES, metrics=RANGES, distributions={"accuracy": "default"}, max_examples=100,
    )  # fmt: skip
    asked = {name: msgspec.convert(each, Bins) for name, each in task["distributions"].items()}
    rng = np.random.default_rng(7)
    for number in range(rounds):
        _round(world, devices, [_update(rng) for _ in devices])
        hits = np.clip(0.95 - 0.6 / (number + 1.5) - rng.gamma(2.0, 0.04, len(devices)), 0.05, 0.99)
        answers = [
            metric_arrays({"loss": float(2.2 * (1 - hit)), "accuracy": float(hit)}, RANGES, 50, 100, asked)
            for hit in hits
        ]
        _round(world, devices, answers)
    return str(task["task_id"])


def _round(world: World, devices: list[Device], arrays: list[dict[str, Any]]) -> None:
    world.clock.now += 40
    for device in devices:
        device.open_session()
    world.start_round(devices)
    world.clock.now += 25
    for device, values in zip(devices, arrays, strict=True):
        device.updating(**values)
    world.settle()


def _update(rng: np.random.Generator) -> dict[str, Any]:
    return {
        "w.update": rng.normal(size=(3, 2)).astype(np.float32),
        "b.update": rng.normal(size=2).astype(np.float32),
        "weight": np.array(1.0, np.float32),
    }


def _fail(world: World, devices: list[Device]) -> str:
    """A task of which one round has failed, because devices fell silent; it is then cancelled."""
    task = world.create_task(name="autumn", rounds=5, cohort=5)
    for device in devices:
        device.open_session()
    world.start_round(devices)
    world.clock.now += 300
    world.settle()
    status, _ = world.operator("POST", f"/v1/tasks/{task['task_id']}/cancel")
    assert status == 200
    return str(task["task_id"])
