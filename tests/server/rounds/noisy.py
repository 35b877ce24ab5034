"""A world whose bundle has devices of equal weight, and rounds of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from archipel.bundle import read_weights
from tests.support.devices import ANSWERED, Device
from tests.support.tiny_bundle import make_bundle
from tests.support.world import World

DELTA_STEP, CLIP, ENTRIES = 1 / 256, 100.0, 8


def equal_weights(world: World, folder: Path) -> World:
    """The world, which publishes a bundle whose devices weigh the same from now on."""
    folder.mkdir(parents=True, exist_ok=True)
    world.bundle_file = make_bundle(folder, world.keys.publisher, weighting="uniform")
    return world


def central(multiplier: float | None = 1e-4, **more: Any) -> dict[str, Any]:
    return {"mechanism": "central", "noise_multiplier": multiplier, "delta": 1e-5, **more}


def give_equal(devices: list[Device], seed: int = 7) -> np.ndarray:
    """Every device gets a vector of small signed integers; returns their sum, int64 [8]."""
    generator = np.random.default_rng(seed)
    total = np.zeros(ENTRIES, np.int64)
    for device in devices:
        update = generator.integers(-3000, 3000, ENTRIES)
        assert device.plan is not None
        device.vector = (update % 2**device.plan.modulus_bits).astype(np.uint32)
        total += update
    return total


def run_round(world: World, devices: list[Device], seed: int = 7) -> np.ndarray:
    """A whole round of these devices; returns the sum of their updates."""
    world.start_round(devices)
    total = give_equal(devices, seed)
    for phase in ANSWERED:
        for device in devices:
            device.answer(phase)
        world.settle()
    return total


def model_of(world: World, task_id: str) -> np.ndarray:
    """The task's newest model, `[8]`."""
    status, data = world.operator("GET", f"/v1/blobs/{world.task(task_id)['model']}")
    assert status == 200
    tensors = read_weights(data)
    return np.concatenate([tensors["w"].reshape(-1), tensors["b"]]).astype(np.float64)
