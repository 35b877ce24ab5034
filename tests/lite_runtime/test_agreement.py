"""A bundle's `predict` is compared with its training form, for which the bundle has no program of its own."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from archipel.bundle import generate_key
from archipel.compression import StaticInt8
from archipel.converter import Compression, Signing, Training, convert
from archipel.graph import Model
from archipel.lite_runtime import Runtime, load
from archipel.lite_runtime.agreement import measure_agreement
from archipel.training import losses, optimizers

KEY = generate_key()
X = np.random.default_rng(1).standard_normal((96, 8)).astype(np.float32)


def _network(outputs: int) -> torch.nn.Module:
    torch.manual_seed(0)
    layers = (torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, outputs))
    return torch.nn.Sequential(*layers).eval()


def _runtime(folder: Path, module: torch.nn.Module, loss: Any, scale: float = 1.0, **options: Any) -> Runtime:
    bundle = convert(
        Model.from_torch(module, X[:2]),
        folder,
        training=None if loss is None else Training(loss, optimizers.sgd(lr=0.5), **options),
        compression=Compression([StaticInt8()], calibration=X * np.float32(scale)),
        signing=Signing(KEY),
        min_snr=-math.inf,
    )
    runtime = load(bundle.folder, [KEY.public_key().public_bytes_raw()])
    assert isinstance(runtime, Runtime)
    return runtime


def _both(runtime: Runtime, module: torch.nn.Module) -> tuple[np.ndarray, np.ndarray]:
    with torch.no_grad():
        return module(torch.tensor(X)).numpy().astype(np.float64), runtime.predict(X).astype(np.float64)


STRATEGIES: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "scaffold": {"strategy": "scaffold"},
    "a frozen backbone": {"trainable": "2.*"},
    "fedrep": {"strategy": "fedrep", "strategy_options": {"personal": "2.*"}},
}


@pytest.mark.sampled(every=8)
@pytest.mark.parametrize("options", STRATEGIES.values(), ids=STRATEGIES)
@pytest.mark.parametrize("scale", [1.0, 1e-3])
def test_classes(scale: float, options: dict[str, Any], tmp_path: Path) -> None:
    module = _network(6)
    runtime = _runtime(tmp_path / "b", module, losses.cross_entropy(), scale, **options)
    found = measure_agreement(runtime, X)
    expected, given = _both(runtime, module)
    assert found is not None
    assert found.share == pytest.approx((expected.argmax(1) == given.argmax(1)).mean())
    assert found.examples == len(X)
    assert found.good(0.8, 10.0) is (scale == 1)


@pytest.mark.parametrize("scale", [1.0, 1e-3])
@pytest.mark.sampled(every=4)
def test_signs(scale: float, tmp_path: Path) -> None:
    module = _network(2)
    runtime = _runtime(tmp_path / "b", module, losses.binary_cross_entropy(), scale)
    found = measure_agreement(runtime, X)
    expected, given = _both(runtime, module)
    assert found is not None
    assert found.share == pytest.approx(((expected > 0) == (given > 0)).mean())


@pytest.mark.parametrize("scale", [1.0, 1e-3])
@pytest.mark.sampled(every=4)
def test_squared_errors(scale: float, tmp_path: Path) -> None:
    module = _network(2)
    runtime = _runtime(tmp_path / "b", module, losses.mse(), scale)
    found = measure_agreement(runtime, X)
    expected, given = _both(runtime, module)
    signal, noise = ((expected - given.mean(axis=0)) ** 2).sum(), ((expected - given) ** 2).sum()
    assert found is not None
    assert found.snr_db == pytest.approx(10 * math.log10(signal / noise), abs=0.01)
    assert found.good(0.8, 10.0) is (scale == 1)


@pytest.mark.sampled(every=4)
def test_what_cannot_be_compared(tmp_path: Path) -> None:
    assert measure_agreement(_runtime(tmp_path / "predict", _network(2), None), X) is None
    found = measure_agreement(_runtime(tmp_path / "kl", _network(3), losses.kl_divergence()), X)
    assert found is not None
    assert found.good(0.8, 10.0) is None
    assert "not compared" in str(found)


@pytest.mark.sampled(every=3)
def test_parameters_stay(tmp_path: Path) -> None:
    runtime = _runtime(tmp_path / "b", _network(6), losses.cross_entropy())
    before = {name: array.copy() for name, array in runtime.parameters().items()}
    measure_agreement(runtime, X)
    for name, array in runtime.parameters().items():
        np.testing.assert_array_equal(array, before[name])
