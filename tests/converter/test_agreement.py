"""`convert` compares what a bundle predicts with what devices train, and refuses a bundle in which the two differ."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from archipel.bundle import Bundle, generate_key
from archipel.compression import CompressedModel, StaticInt8, compress
from archipel.converter import Compression, Signing, Training, convert
from archipel.errors import ConversionError
from archipel.graph import Model
from archipel.lite_runtime import Runtime, load
from archipel.training import losses, optimizers

KEY = generate_key()
TRUSTED = [KEY.public_key().public_bytes_raw()]
CLASSES = 6


def _network(outputs: int) -> torch.nn.Module:
    torch.manual_seed(0)
    layers = (torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, outputs))
    return torch.nn.Sequential(*layers).eval()


X = np.random.default_rng(1).standard_normal((300, 8)).astype(np.float32)
FAINT = X * np.float32(1e-3)


def _bundle(folder: Path, module: torch.nn.Module, loss: Any, **options: Any) -> Bundle:
    bounds = {name: options.pop(name) for name in ("min_agreement", "min_snr") if name in options}
    return convert(
        Model.from_torch(module, X[:2]),
        folder,
        training=None if loss is None else Training(loss, optimizers.sgd(lr=0.01)),
        compression=Compression([StaticInt8()], **options),
        signing=Signing(KEY),
        **bounds,
    )


def _answers(bundle: Bundle, module: torch.nn.Module, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What PyTorch and what the bundle answers, in float64."""
    runtime = load(bundle.folder, TRUSTED)
    assert isinstance(runtime, Runtime)
    with torch.no_grad():
        return module(torch.tensor(x)).numpy().astype(np.float64), runtime.predict(x).astype(np.float64)


def _decibels(expected: np.ndarray, given: np.ndarray) -> float:
    signal = ((expected - expected.mean(axis=0)) ** 2).sum()
    return 10 * math.log10(signal / ((expected - given) ** 2).sum())


@pytest.mark.sampled(every=4)
def test_the_lineage_has_the_agreement(tmp_path: Path) -> None:
    module = _network(CLASSES)
    y = np.arange(len(X)) % CLASSES
    bundle = _bundle(tmp_path / "b", module, losses.cross_entropy(), calibration=X[:200], validation=(X[200:], y[200:]))
    metrics = bundle.manifest.lineage.metrics
    for name, x in (("calibration", X[:200]), ("validation", X[200:])):
        expected, given = _answers(bundle, module, x)
        equal = (expected.argmax(1) == given.argmax(1)).mean()
        assert 0.9 < equal <= 1
        assert metrics[f"agreement_{name}"] == pytest.approx(equal)
        assert metrics[f"snr_db_{name}"] == pytest.approx(_decibels(expected, given), abs=0.06)


@pytest.mark.sampled(every=4)
def test_other_losses_have_a_ratio_only(tmp_path: Path) -> None:
    module = _network(2)
    for loss in (losses.mse(), None):
        bundle = _bundle(tmp_path / str(loss), module, loss, calibration=X[:200])
        metrics = bundle.manifest.lineage.metrics
        assert "agreement_calibration" not in metrics
        assert metrics["snr_db_calibration"] == pytest.approx(_decibels(*_answers(bundle, module, X[:200])), abs=0.06)


@pytest.mark.sampled(every=3)
def test_labels_say_that_there_are_classes(tmp_path: Path) -> None:
    module = _network(CLASSES)
    sets = {"calibration": X[:200], "validation": (X, np.arange(len(X)) % CLASSES)}
    bundle = _bundle(tmp_path / "b", module, None, **sets)
    metrics = bundle.manifest.lineage.metrics
    expected, given = _answers(bundle, module, X)
    assert metrics["agreement_validation"] == pytest.approx((expected.argmax(1) == given.argmax(1)).mean())
    assert "agreement_calibration" not in metrics


@pytest.mark.sampled(every=3)
def test_signs_are_classes(tmp_path: Path) -> None:
    module = _network(1)
    bundle = _bundle(tmp_path / "b", module, losses.binary_cross_entropy(), calibration=X[:200])
    expected, given = _answers(bundle, module, X[:200])
    equal = ((expected > 0) == (given > 0)).mean()
    assert bundle.manifest.lineage.metrics["agreement_calibration"] == pytest.approx(equal)


@pytest.mark.sampled(every=4)
def test_calibration_examples_in_another_scale_are_refused(tmp_path: Path) -> None:
    """All of them are in one class, which int8 answers as well: the noise shows what the classes do not."""
    with pytest.raises(ConversionError, match=r"calibration: .*\(all in one class\).* dB.*like those of devices") as e:
        _bundle(tmp_path / "b", _network(CLASSES), losses.cross_entropy(), calibration=FAINT)
    assert "\n" not in str(e.value)
    assert not (tmp_path / "b").exists()
    with pytest.raises(ConversionError, match=r"calibration: .*signal to noise .* expected at least 10 dB"):
        _bundle(tmp_path / "b", _network(2), losses.mse(), calibration=FAINT)


@pytest.mark.sampled(every=4)
def test_validation_examples_show_it_too(tmp_path: Path) -> None:
    module = _network(CLASSES)
    options: dict[str, Any] = {"calibration": FAINT, "validation": (X, np.zeros(len(X), np.int64)), "min_snr": -99}
    with pytest.raises(ConversionError, match=r"validation: .*of 300 examples.*expected at least 80\.0%") as caught:
        _bundle(tmp_path / "b", module, losses.cross_entropy(), **options)
    told = re.search(r"gives ([0-9.]+)%", str(caught.value))
    bundle = _bundle(tmp_path / "b", module, losses.cross_entropy(), **options, min_agreement=0.0)
    expected, given = _answers(bundle, module, X)
    equal = (expected.argmax(1) == given.argmax(1)).mean()
    assert told is not None
    assert float(told[1]) == pytest.approx(100 * equal, abs=0.06)
    assert bundle.manifest.lineage.metrics["agreement_validation"] == pytest.approx(equal)


@pytest.mark.sampled(every=4)
def test_a_model_that_was_compressed_before_is_compared(tmp_path: Path) -> None:
    model = Model.from_torch(_network(CLASSES), X[:2])
    bad, _ = compress(model, [StaticInt8()], calibration=FAINT)
    training = Training(losses.cross_entropy(), optimizers.sgd(lr=0.01))
    with pytest.raises(ConversionError, match="calibration: "):
        convert(bad, tmp_path / "b", training=training, signing=Signing(KEY))
    good, _ = compress(model, [StaticInt8()], data=(X, np.zeros(len(X), np.int64)))
    metrics = convert(good, tmp_path / "b", training=training, signing=Signing(KEY)).manifest.lineage.metrics
    assert metrics["snr_db_calibration"] > 20


class _TwoHeads(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = _network(CLASSES), torch.nn.Linear(CLASSES, CLASSES)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first = self.body(x)
        return first, self.head(first)


CHANGES: dict[str, Callable[[CompressedModel], CompressedModel]] = {
    "none": lambda model: model,
    "copied": lambda model: model.copy(),
    "other weights": lambda model: model.with_parameters({name: 2 * x for name, x in model.parameters.items()}),
}


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("output", [0, 1])
def test_a_compressed_model_that_was_changed_is_compared(change: str, output: int, tmp_path: Path) -> None:
    bad, _ = compress(Model.from_torch(_TwoHeads().eval(), X[:2]), [StaticInt8()], calibration=FAINT)
    name = bad.outputs[output].name
    training = Training(losses.cross_entropy(), optimizers.sgd(lr=0.01), loss_output=name)
    with pytest.raises(ConversionError, match="calibration: "):
        convert(CHANGES[change](bad), tmp_path / "b", training=training, signing=Signing(KEY))


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(
    ("bounds", "message"),
    [({"min_agreement": 1.5}, "min_agreement: expected a number from 0 to 1"), ({"min_snr": math.nan}, "min_snr: ")],
)
def test_wrong_bounds_are_told(tmp_path: Path, bounds: dict[str, float], message: str) -> None:
    with pytest.raises(ConversionError, match=message):
        _bundle(tmp_path / "b", _network(CLASSES), losses.cross_entropy(), calibration=X, **bounds)
