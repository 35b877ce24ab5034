"""A model with BatchNormalization from conversion to a device: its running statistics are parameters that are averaged.

With `fedbn` they are the device's own state.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from archipel import bundle as b
from archipel import lite_runtime, training
from archipel.bundle import role_of
from archipel.bundle.roles import Update
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


NAMES = {f"{layer}.running_{what}" for layer in (1, 5) for what in ("mean", "var")}
BOTH = pytest.mark.parametrize("strategy", ["fedavg", "fedbn"])


@pytest.fixture(scope="module")
def bundle_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], b.Bundle]:
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 8), nn.BatchNorm1d(8),
        nn.ReLU(), nn.Linear(8, 3),
    )  # fmt: skip
    model = Model.from_torch(module, torch.zeros(2, 1, 8, 8))

    @cache
    def of(strategy: str) -> b.Bundle:
        return convert(
            model, tmp_path_factory.mktemp("b") / "normalized", signing=Signing(KEY),
            training=Training(training.losses.cross_entropy(), training.optimizers.sgd(lr=0.1), strategy=strategy),
        )  # fmt: skip

    return of


def runtime(bundle: b.Bundle, state: lite_runtime.DeviceState | None = None) -> lite_runtime.Runtime:
    return lite_runtime.Runtime(bundle, state=state)


@BOTH
@pytest.mark.sampled(every=4)
def test_who_has_the_statistics(bundle_of: Callable[[str], b.Bundle], strategy: str) -> None:
    bundle, shared = bundle_of(strategy), strategy == "fedavg"
    assert NAMES & {spec.name for spec in bundle.manifest.parameters} == (NAMES if shared else set())
    programs = bundle.manifest.programs
    for name, ports in (
        ("train", programs["train"].inputs),
        ("train", programs["train"].outputs),
        ("refresh", programs["refresh"].inputs),
    ):
        roles = {port.tensor: role_of(port) for port in ports if getattr(port, "tensor", "") in NAMES}
        assert roles == dict.fromkeys(NAMES, "parameter" if shared else "state"), name
    uploads = {port.tensor: port for port in programs["finish"].outputs if isinstance(port, Update)}
    assert uploads.keys() & NAMES == (NAMES if shared else set())
    if shared:
        # In standard deviations and variances, clamped to 3 and 9, and no part of what is clipped.
        mean, variance = uploads["1.running_mean"], uploads["1.running_var"]
        assert (mean.kind, mean.range, mean.clip, mean.mean) == ("mean", 3.0, None, "")
        assert (variance.kind, variance.range, variance.clip, variance.mean) == ("variance", 9.0, None, mean.tensor)
    derived = {port.tensor for port in programs["refresh"].outputs}
    assert {"0.weight_folded_computed", "0.weight_folded_bias_computed"} <= derived  # by which `predict` follows them


@pytest.mark.sampled(every=3)
@BOTH
def test_evaluation_and_prediction_follow_what_training_moves(
    bundle_of: Callable[[str], b.Bundle], strategy: str, data: tuple[np.ndarray, np.ndarray], tmp_path: Path
) -> None:
    bundle = bundle_of(strategy)
    device, (x, y) = runtime(bundle), data
    before = device.evaluate(x, y)
    assert before["correct"] == (device.predict(x).argmax(1) == y).sum()
    device.fit(x, y, epochs=8, batch_size=16)
    after = device.evaluate(x, y)
    assert after["correct"] == 48
    assert after["loss"] < 0.3 * before["loss"]
    assert (device.predict(x).argmax(1) == y).all()
    own = device.parameters() if strategy == "fedavg" else device.state.state
    assert np.abs(own["1.running_mean"] - bundle.tensor("1.running_mean")).max() > 0.1

    # A new start with the same parameters and the device's file; without the file the statistics are the bundle's.
    device.state.save(tmp_path / "state")
    again = runtime(bundle, lite_runtime.DeviceState.load(tmp_path / "state"))
    again.set_parameters(device.parameters())
    assert again.evaluate(x, y) == after
    np.testing.assert_array_equal(again.predict(x), device.predict(x))
    if strategy == "fedavg":
        assert not device.state.state
        return
    forgetful = runtime(bundle)
    forgetful.set_parameters(device.parameters())
    assert forgetful.evaluate(x, y)["loss"] > 2 * after["loss"]
