"""int8 `predict` of networks with BatchNormalization, which int8 folds away and training moves: it follows float."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from archipel import Model, models, training
from archipel.bundle import generate_key, role_of
from archipel.compression import StaticInt8
from archipel.converter import Compression, Signing, Training, convert
from archipel.lite_runtime import Runtime
from archipel.training.batch_norm import BatchNorm

KEY = generate_key()


class Setting:
    """A network that learned a few kinds of noisy pictures, and pictures of a device, which are brighter."""

    def __init__(self, module: torch.nn.Module, shape: tuple[int, ...], classes: int) -> None:
        self._rng = np.random.default_rng(0)
        self._kinds = self._rng.standard_normal((classes, *shape), np.float32)
        x, y = self.draw(192, 0.0)
        optimizer = torch.optim.SGD(module.train().parameters(), lr=0.05, momentum=0.9)
        for first in 4 * [*range(0, 192, 32)]:
            rows = slice(first, first + 32)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(module(torch.from_numpy(x[rows])), torch.from_numpy(y[rows])).backward()
            optimizer.step()
        self.model = Model.from_torch(module, torch.from_numpy(x[:2]))
        self.seen = x[:64]
        self.local, self.new = self.draw(48, 0.5), self.draw(120, 0.5)[0]

    def draw(self, count: int, brightness: float) -> tuple[np.ndarray, np.ndarray]:
        y = self._rng.integers(0, len(self._kinds), count)
        noise = self._rng.standard_normal((count, *self._kinds.shape[1:]), np.float32)
        return self._kinds[y] + 1.5 * noise + np.float32(brightness), y

    def runtimes(self, folder: Path, batch_norm: BatchNorm) -> list[Runtime]:
        return [
            Runtime(
                convert(
                    self.model,
                    folder / name,
                    training=Training(training.losses.cross_entropy(), training.optimizers.sgd(lr=0.02),
                                      step_options={"batch_norm": batch_norm}),
                    compression=Compression(recipe, calibration={self.model.inputs[0].name: self.seen}),
                    signing=Signing(KEY),
                )
            )
            for name, recipe in (("int8", [StaticInt8(narrow_convolutions="int8")]), ("float", []))
        ]  # fmt: skip


@pytest.fixture(scope="module")
def ds_cnn() -> Setting:
    return Setting(models.ds_cnn(0, filters=16, blocks=2), (1, 49, 10), 12)


@pytest.fixture(scope="module")
def resnet8() -> Setting:
    return Setting(models.resnet8(0), (3, 32, 32), 10)


def decibels(signal: np.ndarray, other: np.ndarray) -> float:
    return float(10 * np.log10(np.square(signal).mean() / np.square(signal - other).mean()))


@pytest.mark.sampled(every=8)
@pytest.mark.parametrize(
    ("network", "batch_norm"),
    [
        ("ds_cnn", "train"),
        ("ds_cnn", "frozen"),
        ("ds_cnn", "folded"),
        pytest.param("resnet8", "train", marks=pytest.mark.slow),
    ],
)
def test_int8_follows_local_steps(
    network: str, batch_norm: BatchNorm, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    setting: Setting = request.getfixturevalue(network)
    int8, floating = setting.runtimes(tmp_path, batch_norm)
    stale = int8.predict(setting.new)
    assert decibels(floating.predict(setting.new), stale) > 20
    for device in (int8, floating):
        device.fit(*setting.local, epochs=3, batch_size=16)
    answers, expected = int8.predict(setting.new), floating.predict(setting.new)
    assert (answers.argmax(1) == expected.argmax(1)).mean() >= 0.93
    assert decibels(expected, answers) > 20
    # It did follow: without refresh it would be far off.
    assert decibels(expected, stale) < decibels(expected, answers) - 5

    x, y = setting.local
    for device in (int8, floating):
        logits = torch.tensor(device.predict(x))
        measured = device.evaluate(x, y)
        assert measured["correct"] == int((logits.argmax(1) == torch.tensor(y)).sum())
        loss = torch.nn.functional.cross_entropy(logits, torch.tensor(y), reduction="sum")
        assert measured["loss"] == pytest.approx(float(loss), rel=1e-4)
    # Another graph answers, so another number is measured.
    assert int8.evaluate(x, y)["loss"] != floating.evaluate(x, y)["loss"]


@pytest.mark.sampled(every=8)
@pytest.mark.parametrize(
    ("batch_norm", "moves", "kept"), [("train", True, True), ("frozen", False, True), ("folded", False, False)]
)
def test_what_the_bundle_has(ds_cnn: Setting, tmp_path: Path, batch_norm: BatchNorm, moves: bool, kept: bool) -> None:
    bundle = ds_cnn.runtimes(tmp_path, batch_norm)[0].bundle
    names = {spec.name for spec in bundle.manifest.parameters}
    assert ("norm.weight" in names) == kept
    assert ("conv.weight_bias" in names) != kept
    for program in ("train", "refresh"):
        roles = {role_of(port) for port in bundle.program(program).inputs if "running" in port.name}
        assert roles == ({"parameter"} if moves else set()), program
    derived = {port.tensor for port in bundle.program("refresh").outputs}
    assert not any("norm" in name or "running" in name for name in derived)
    weight, bias = ("conv.weight_folded", "conv.weight_folded_bias") if kept else ("conv.weight", "conv.weight_bias")
    assert {f"{weight}_quantized", f"{bias}_quantized"} <= derived
