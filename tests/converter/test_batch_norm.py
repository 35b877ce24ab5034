"""A model with BatchNormalization from conversion to a device: its running statistics are the device's own state."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from archipel import bundle as b
from archipel import lite_runtime, training
from archipel.bundle import role_of
from archipel.converter import Signing, Training, convert
from archipel.graph import Model

KEY = b.generate_key()


@pytest.fixture(scope="module")
def data() -> tuple[np.ndarray, np.ndarray]:
    """Pictures far from mean 0 and variance 1, where the model's own statistics begin."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 3, 48)
    kinds = rng.standard_normal((3, 1, 8, 8), np.float32)
    return 2 * kinds[labels] + rng.standard_normal((48, 1, 8, 8), np.float32) + 3, labels


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> b.Bundle:
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 8), nn.BatchNorm1d(8),
        nn.ReLU(), nn.Linear(8, 3),
    )  # fmt: skip
    return convert(
        Model.from_torch(module, torch.zeros(2, 1, 8, 8)), tmp_path_factory.mktemp("b") / "normalized",
        training=Training(training.losses.cross_entropy(), training.optimizers.sgd(lr=0.1)), signing=Signing(KEY),
    )  # fmt: skip


def runtime(bundle: b.Bundle, state: lite_runtime.DeviceState | None = None) -> lite_runtime.Runtime:
    return lite_runtime.Runtime(bundle, state=state)


def test_statistics_are_state_and_no_parameters(bundle: b.Bundle) -> None:
    names = {f"{layer}.running_{what}" for layer in (1, 5) for what in ("mean", "var")}
    assert not names & {spec.name for spec in bundle.manifest.parameters}
    programs = bundle.manifest.programs
    for name, ports in (
        ("train", programs["train"].inputs),
        ("train", programs["train"].outputs),
        ("refresh", programs["refresh"].inputs),
    ):
        assert {port.tensor for port in ports if role_of(port) == "state"} == names, name
    derived = {port.tensor for port in programs["refresh"].outputs}
    assert {"0.weight_folded_computed", "0.weight_folded_bias_computed"} <= derived  # by which `predict` follows them


def test_evaluation_and_prediction_follow_what_training_moves(
    bundle: b.Bundle, data: tuple[np.ndarray, np.ndarray], tmp_path: Path
) -> None:
    device, (x, y) = runtime(bundle), data
    before = device.evaluate(x, y)
    assert before["correct"] == (device.predict(x).argmax(1) == y).sum()
    device.fit(x, y, epochs=8, batch_size=16)
    after = device.evaluate(x, y)
    assert after["correct"] == 48
    assert after["loss"] < 0.3 * before["loss"]
    assert (device.predict(x).argmax(1) == y).all()
    assert np.abs(device.state.state["1.running_mean"] - bundle.tensor("1.running_mean")).max() > 0.1

    # A new start with the same parameters and the device's file; without the file the statistics are the bundle's.
    device.state.save(tmp_path / "state")
    again = runtime(bundle, lite_runtime.DeviceState.load(tmp_path / "state"))
    again.set_parameters(device.parameters())
    assert again.evaluate(x, y) == after
    np.testing.assert_array_equal(again.predict(x), device.predict(x))
    forgetful = runtime(bundle)
    forgetful.set_parameters(device.parameters())
    assert forgetful.evaluate(x, y)["loss"] > 2 * after["loss"]
