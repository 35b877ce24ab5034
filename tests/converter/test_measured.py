"""What is measured is what runs: an int8 `predict` that is wrong is measured as wrong."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from archipel.bundle import Bundle, generate_key
from archipel.compression import StaticInt8
from archipel.converter import Compression, Signing, Training, convert
from archipel.datasets import digits_by_writer
from archipel.graph import Model
from archipel.lite_runtime import Runtime, load
from archipel.lite_runtime.agreement import measure_agreement
from archipel.models import digits_cnn
from archipel.training import losses, optimizers
from archipel.training.cloud import TrainConfig, train

KEY = generate_key()
TRUSTED = [KEY.public_key().public_bytes_raw()]


@pytest.fixture(scope="module")
def digits() -> tuple[np.ndarray, np.ndarray]:
    whole = digits_by_writer()
    some = whole.of(whole.writers_in([0])[:24])
    return some.inputs(), some.targets()


@pytest.fixture(scope="module")
def model(digits: tuple[np.ndarray, np.ndarray]) -> Model:
    x, y = digits
    return train(digits_cnn(0), (x[400:], y[400:]), TrainConfig(epochs=4), validation=(x[:400], y[:400])).model


def bundle(model: Model, folder: Path, calibration: np.ndarray) -> Bundle:
    return convert(
        model,
        folder,
        training=Training(losses.cross_entropy(), optimizers.sgd(lr=0.01)),
        compression=Compression([StaticInt8()], calibration={model.inputs[0].name: calibration}),
        signing=Signing(KEY),
        min_snr=-math.inf,
    )


@pytest.fixture(scope="module", params=[1.0, 1e-3], ids=["calibrated", "calibrated on other inputs"])
def runtime(
    request: pytest.FixtureRequest,
    model: Model,
    digits: tuple[np.ndarray, np.ndarray],
    tmp_path_factory: pytest.TempPathFactory,
) -> Runtime:
    calibration = digits[0][:256] * np.float32(request.param)
    return load(bundle(model, tmp_path_factory.mktemp("bundle") / "b", calibration).folder, TRUSTED)


def measured_by_torch(runtime: Runtime, x: np.ndarray, y: np.ndarray) -> tuple[float, int]:
    """The loss and the right answers of what `predict` answers."""
    logits, labels = torch.tensor(runtime.predict(x)), torch.tensor(y)
    loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
    return float(loss), int((logits.argmax(1) == labels).sum())


@pytest.mark.sampled(every=8)
def test_an_evaluation_measures_the_answers(runtime: Runtime, digits: tuple[np.ndarray, np.ndarray]) -> None:
    x, y = digits[0][:400], digits[1][:400]
    loss, correct = measured_by_torch(runtime, x, y)
    found = runtime.evaluate(x, y, batch_size=64)
    assert found["correct"] == correct
    assert found["loss"] == pytest.approx(loss, rel=1e-4)
    assert found["count"] == 400


@pytest.mark.sampled(every=4)
def test_a_wrong_predict_is_told(model: Model, digits: tuple[np.ndarray, np.ndarray], tmp_path: Path) -> None:
    x, y = digits[0][:400], digits[1][:400]
    good = load(bundle(model, tmp_path / "good", digits[0][:256]).folder, TRUSTED)
    wrong = load(bundle(model, tmp_path / "wrong", digits[0][:256] * np.float32(1e-3)).folder, TRUSTED)
    assert good.evaluate(x, y)["correct"] > 300
    assert wrong.evaluate(x, y)["correct"] < 200
    for runtime, alike in ((good, True), (wrong, False)):
        agreement = measure_agreement(runtime, x)
        assert agreement is not None
        assert agreement.good(0.8, 10.0) is alike


@pytest.mark.sampled(every=4)
def test_the_validation_of_a_fit_measures_what_the_fit_has_made(
    model: Model, digits: tuple[np.ndarray, np.ndarray], tmp_path: Path
) -> None:
    x, y = digits
    runtime = load(bundle(model, tmp_path / "b", x[:256]).folder, TRUSTED)
    validation = (x[:200], y[:200])
    history = runtime.fit(x[400:800], y[400:800], epochs=2, batch_size=32, validation=validation)
    assert len(history.validation) == 2
    loss, correct = measured_by_torch(runtime, *validation)
    # After the last epoch the model is the one that the runtime keeps.
    assert history.validation[-1]["correct"] == correct
    assert history.validation[-1]["loss"] == pytest.approx(loss, rel=1e-4)
    assert history.validation[0]["loss"] != history.validation[-1]["loss"]
