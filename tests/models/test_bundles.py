"""The larger networks as bundles: devices predict what PyTorch does, and what they train on gets better."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from archipel import convert, models
from archipel.bundle import generate_key
from archipel.converter import Signing, Training
from archipel.lite_runtime import Runtime
from archipel.training import losses, optimizers

RNG = np.random.default_rng(0)


def pictures(*shape: int) -> tuple[np.ndarray, ...]:
    return (RNG.standard_normal((16, *shape), np.float32),)


def tokens(below: int = 20) -> np.ndarray:
    return RNG.integers(0, below, (16, 8))


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[np.ndarray, ...], int]] = {
    "resnet18": (lambda: models.resnet18(0, 1, 3, "small", 8), pictures(1, 16, 16), 3),
    "resnet50": (lambda: models.resnet50(0, 1, 3, "small", 8), pictures(1, 16, 16), 3),
    "bc_resnet": (lambda: models.bc_resnet(0, 3), pictures(1, 40, 30), 3),
    "deep_conv_lstm": (lambda: models.deep_conv_lstm(0, 3, 3, 4, 8, dropout=0.1), pictures(3, 24), 3),
    "gpt": (lambda: models.gpt(0, 20, 8, 16, 2, 2), (tokens(),), 20),
    "bert": (
        lambda: models.bert(0, "classification", 3, 20, 8, 16, 2, 1),
        (tokens(), (np.arange(8) < RNG.integers(4, 9, (16, 1))).astype(np.int64), tokens(2)),
        3,
    ),
}
LONG = set(CASES) - {"bert"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in LONG else n for n in CASES])
@pytest.mark.sampled(every=8)
def test_devices_predict_and_train(name: str, tmp_path: Path) -> None:
    make, inputs, classes = CASES[name]
    module = make().eval()
    with torch.no_grad():
        expected = module(*map(torch.from_numpy, inputs)).numpy()
    # BatchNormalization with the first statistics: sixteen examples of noise are no batch to learn these from.
    training = Training(losses.cross_entropy(axis=-1), optimizers.adam(lr=0.01), step_options={"batch_norm": "frozen"})
    example = tuple(map(torch.from_numpy, (array[:2] for array in inputs)))
    bundle = convert(module, tmp_path / "b", example=example, training=training, signing=Signing(generate_key()))
    device = Runtime(bundle)
    fields = [port.name for port in bundle.program("predict").inputs]
    batch = dict(zip(fields, inputs, strict=True))
    np.testing.assert_allclose(device.predict(batch)["output"], expected, rtol=1e-4, atol=1e-5)
    labels = np.random.default_rng(1).integers(0, classes, expected.shape[:-1])
    history = device.fit(batch, labels, epochs=25, batch_size=8)
    first, last = history.losses[:2], history.losses[-2:]
    assert np.mean(last) < 0.95 * np.mean(first)
