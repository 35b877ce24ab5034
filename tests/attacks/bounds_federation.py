"""A server in this process and ten devices that really train a small network on the shipped digits, for attacks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from archipel.bundle import Bundle, PrivacyPolicy, pack, read_weights
from archipel.converter import Signing, Training, convert
from archipel.datasets import digits_by_writer, split_writers
from archipel.lite_runtime import Runtime
from archipel.protocol.metrics.training_metrics import training_arrays
from archipel.protocol.uploads import plan_layout
from archipel.protocol.vector import Layout
from archipel.training import losses, optimizers
from tests.support.devices import Device, Keys
from tests.support.fixtures.server import data_folder, empty_database, keys, server_settings, world
from tests.support.world import World

__all__ = ["bundle", "bundle_file", "data_folder", "empty_database", "keys", "made", "server_settings", "world"]
"""Fixtures: import all of them."""

DEVICES, BITS, CLIP = 10, 16, 1.0
LARGEST = 2 ** (BITS - 1) - 1
TASK = {"cohort": DEVICES, "min_cohort": DEVICES, "threshold": 7}


def make_bundle(folder: Path, key: Ed25519PrivateKey, strategy: str = "fedavg", **options: Any) -> tuple[Bundle, Path]:
    """A small network to be trained by that strategy, as a folder and as a .bundle file."""
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10))
    policy = PrivacyPolicy(
        modes=("secure", "plain"), min_cohort=10, threshold=0.67, max_clip=CLIP, max_bits=BITS, colluders=0.0
    )
    made = convert(
        network, folder, example=torch.zeros(2, 1, 28, 28),
        training=Training(losses.cross_entropy(), optimizers.sgd(lr=0.01), strategy=strategy,
                          strategy_options={"clip": CLIP, "bits": BITS, **options}, batch_size=10),
        privacy=policy, signing=Signing(key),
    )  # fmt: skip
    pack(made.folder, folder.with_suffix(".bundle"))
    return made, folder.with_suffix(".bundle")


@pytest.fixture(scope="session")
def made(keys: Keys, tmp_path_factory: pytest.TempPathFactory) -> tuple[Bundle, Path]:
    return make_bundle(tmp_path_factory.mktemp("attacked") / "digits", keys.publisher)


@pytest.fixture(scope="session")
def bundle(made: tuple[Bundle, Path]) -> Bundle:
    return made[0]


@pytest.fixture(scope="session")
def bundle_file(made: tuple[Bundle, Path]) -> Path:
    return made[1]


class Digits:
    """Ten pupils' devices. `vectors` are their updates: int64 by device, the weight last. What they report beside the
    update, such as the loss, stays as it is."""

    def __init__(self, bundle: Bundle, world: World) -> None:
        digits = digits_by_writer()
        self.world, self.bundle, self.runtime = world, bundle, Runtime(bundle)
        self.layout = Layout.of(bundle.program("finish"))
        self.reports: list[np.ndarray] = []
        self.owners = [digits.of([writer]) for writer in split_writers(digits, devices=DEVICES, seed=0).devices]
        self.devices = world.add_devices(DEVICES)

    def begin(self, task: dict[str, Any]) -> list[np.ndarray]:
        """Open a round; every device trains. Returns what they would send."""
        self.world.start_round(self.devices)
        parameters = self.weights(self.devices[0].plan.weights)  # type: ignore[union-attr]
        finish, vectors = self.bundle.program("finish"), []
        for number, (device, owned) in enumerate(zip(self.devices, self.owners, strict=True)):
            assert device.plan is not None
            made = self.runtime.local_round(owned.inputs(), owned.targets(), seed=number, parameters=parameters)
            reported = training_arrays(self.bundle.manifest, finish, made.arrays, made.metrics)
            bits, layout = device.plan.modulus_bits, plan_layout(device.plan, self.bundle.manifest)
            arrays = {**made.arrays, **reported}
            vector = layout.encode(arrays, modulus_bits=bits, max_cohort=DEVICES).astype(np.int64)
            vector[vector >= 1 << (bits - 1)] -= 1 << bits
            vectors.append(vector[: -len(reported)])
            self.reports.append(vector[-len(reported) :])
        return vectors

    def finish(self, vectors: list[np.ndarray]) -> dict[str, Any]:
        """Mask, confirm, unmask; the server sums up. Returns the round as an operator sees it."""
        reports, self.reports = self.reports, []
        for device, *parts in zip(self.devices, vectors, reports, strict=True):
            vector = np.concatenate(parts)
            device.vector = (vector % 2**device.plan.modulus_bits).astype(np.uint32)  # type: ignore[union-attr]
        self.world.run_to("unmasking", self.devices)
        for device in self.devices:
            device.unmasking()
        self.world.settle()
        round_id = self.devices[0].plan.round_id  # type: ignore[union-attr]
        return dict(self.world.operator("GET", f"/v1/rounds/{round_id}/participants")[1])

    def weights(self, digest: str) -> dict[str, np.ndarray]:
        status, data = self.world.operator("GET", f"/v1/blobs/{digest}")
        assert status == 200
        return read_weights(data)

    def step(self, shown: dict[str, Any]) -> float:
        """The norm of what a committed round changed, taken from the weights themselves."""
        before, after = self.weights(shown["weights_in"]), self.weights(shown["weights_out"])
        return float(np.sqrt(sum(((after[n].astype(float) - before[n]) ** 2).sum() for n in after)))


assert Device
