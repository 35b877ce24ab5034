"""Rounds whose devices add the noise, over the API: the model, the account, the budget, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from archipel.bundle import decode_manifest
from archipel.privacy import Gaussian, spent_epsilon
from archipel.protocol.uploads import plan_layout
from archipel.server.database.privacy_tables import PrivacyEvent
from archipel.server.database.tables import BundleRow
from tests.server.rounds.noisy import CLIP, ENTRIES, model_of
from tests.support.devices import ANSWERED, Device
from tests.support.tiny_bundle import make_bundle
from tests.support.world import World


@pytest.fixture
def noisy(world: World, tmp_path: Path) -> World:
    """A third of the devices may work with the server."""
    return publish(world, tmp_path)


def publish(world: World, folder: Path, weighting: str = "uniform", **policy: Any) -> World:
    given = {"colluders": 1 / 3, **policy}
    world.bundle_file = make_bundle(folder, world.keys.publisher, weighting=weighting, min_cohort=2, policy=given)
    return world


COHORT = {"cohort": 6, "min_cohort": 4, "threshold": 5}


def distributed(multiplier: float | None = 1.0, **more: Any) -> dict[str, Any]:
    return {"mechanism": "distributed", "noise_multiplier": multiplier, "delta": 1e-5, **more}


def give_changes(world: World, devices: list[Device], seed: int = 7) -> np.ndarray:
    """Every device gets the vector of random changes, of about the clip's length; returns their sum, `[8]`."""
    generator, total = np.random.default_rng(seed), np.zeros(ENTRIES)
    with world.services.database.read() as session:
        manifest = decode_manifest(session.query(BundleRow).one().manifest)
    for device in devices:
        plan = device.plan
        assert plan is not None
        changes = generator.normal(size=ENTRIES)
        changes *= 0.9 * CLIP / np.linalg.norm(changes)
        arrays = {"w.update": np.float32(changes[:6].reshape(3, 2)), "b.update": np.float32(changes[6:])}
        layout = plan_layout(plan, manifest)
        device.vector = layout.encode(arrays, modulus_bits=plan.modulus_bits, max_cohort=plan.max_cohort)
        total += changes
    return total


def run_round(world: World, devices: list[Device], seed: int = 7) -> np.ndarray:
    """A whole round of these devices; returns the sum of their changes without noise."""
    world.start_round(devices)
    total = give_changes(world, devices, seed)
    for phase in ANSWERED:
        for device in devices:
            device.answer(phase)
        world.settle()
    return total


def rows(world: World) -> list[Any]:
    with world.services.database.read() as session:
        return [json.loads(row.event) for row in session.query(PrivacyEvent).order_by(PrivacyEvent.number)]


def epsilon(*multipliers: float) -> float:
    return spent_epsilon([Gaussian(noise_multiplier=each) for each in multipliers], 1e-5)


def sensitivity(steps: int) -> float:
    """Kairouz, Liu and Steinke 2021, equation 2, for 8 elements of a clip of so many steps and beta = exp(-1/2)."""
    return math.sqrt(steps**2 + ENTRIES / 4 + math.sqrt(2 * 0.5) * (steps + math.sqrt(ENTRIES) / 2))


def test_the_new_model_is_the_mean_with_the_noise_of_all_devices(noisy: World) -> None:
    task = noisy.create_task(differential_privacy=distributed(0.05), rounds=12, **COHORT)
    devices = noisy.add_devices(6)
    before, noise = np.zeros(ENTRIES), []
    for number in range(12):
        exact = run_round(noisy, devices, number)
        after = model_of(noisy, task["task_id"])
        noise.append((after - before) * 6 - exact)
        before = after
    plan = devices[0].plan
    assert plan is not None
    assert plan.noise is not None
    # Five of six devices have to be there to unmask, and two may work with the server: three are left.
    assert (plan.colluders, plan.threshold, plan.max_cohort) == (2, 5, 6)
    norm = sensitivity(plan.noise.steps)
    assert plan.noise.deviation == pytest.approx(0.05 * norm / math.sqrt(3), abs=1)
    # All six add noise, and rounding by chance adds less than a quarter of a step's variance.
    step = CLIP / plan.noise.steps
    expected = step * math.sqrt(6 * (plan.noise.deviation**2 + 0.25))
    found = np.concatenate(noise)
    assert found.std() == pytest.approx(expected, rel=5 / math.sqrt(2 * found.size))
    assert abs(found.mean()) < 5 * expected / math.sqrt(found.size)
    assert noisy.task(task["task_id"])["state"] == "completed"


def test_a_round_costs_what_the_noise_of_its_devices_makes_of_it(noisy: World) -> None:
    task = noisy.create_task(differential_privacy=distributed(1.0), rounds=2, **COHORT)
    devices = noisy.add_devices(6)
    run_round(noisy, devices)
    plan = devices[0].plan
    assert plan is not None
    assert plan.noise is not None
    [[event]] = rows(noisy)
    # Six devices less two that may collude.
    expected = math.sqrt(4) * plan.noise.deviation / sensitivity(plan.noise.steps)
    assert event["type"] == "gaussian"
    assert event["noise_multiplier"] == pytest.approx(expected, rel=1e-3)
    assert expected == pytest.approx(math.sqrt(4 / 3), rel=0.01)
    spent = noisy.task(task["task_id"])["privacy_spent"]
    assert spent["epsilon"] == pytest.approx(epsilon(event["noise_multiplier"]), rel=1e-12)
    assert "nobody sees a sum without noise" in spent["trust"]
