"""After learning on the device, the int8 `predict` answers as the float parameters do."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from archipel.bundle import generate_key
from archipel.compression import StaticInt8
from archipel.converter import Compression, Signing, Training, convert
from archipel.datasets import DigitsByWriter, digits_by_writer, split_writers
from archipel.lite_runtime import Runtime
from archipel.models import digits_cnn
from archipel.training import losses, optimizers
from archipel.training.cloud import TrainConfig, train

FITS = 8


@pytest.fixture(scope="module")
def digits() -> DigitsByWriter:
    return digits_by_writer()


@pytest.fixture(scope="module")
def runtimes(digits: DigitsByWriter, tmp_path_factory: pytest.TempPathFactory) -> tuple[Runtime, Runtime]:
    """The same trained model with an int8 and with a float `predict`."""
    split = split_writers(digits, devices=FITS, seed=0)
    staff, validation = digits.of(split.cloud_train), digits.of(split.cloud_validation)
    trained = train(
        digits_cnn(seed=0), (staff.inputs(), staff.targets()), TrainConfig(epochs=4),
        validation=(validation.inputs(), validation.targets()),
    ).module  # fmt: skip
    folder: Path = tmp_path_factory.mktemp("bundles")
    key = generate_key()
    made = []
    for name, recipe in (("int8", [StaticInt8()]), ("float", [])):
        bundle = convert(
            trained, folder / name, example=np.zeros((2, 1, 28, 28), np.float32),
            training=Training(losses.cross_entropy(), optimizers.sgd()),
            compression=Compression(recipe, calibration={"input": staff.inputs()[::10]}), signing=Signing(key),
        )  # fmt: skip
        made.append(Runtime(bundle))
    return made[0], made[1]


@pytest.mark.slow
def test_int8_follows_float_after_every_local_fit(runtimes: tuple[Runtime, Runtime], digits: DigitsByWriter) -> None:
    int8, floating = runtimes
    split = split_writers(digits, devices=FITS, seed=0)
    held_out = digits.of(split.held_out[:60])
    published = int8.predict(held_out.inputs()).argmax(1)
    agreements, moved = [], []
    for writer in split.devices:
        own = digits.of([writer])
        int8.reset("parameters")
        int8.fit(own.inputs(), own.targets(), epochs=5, batch_size=10, hyperparameters={"lr": 0.02}, seed=0)
        floating.set_parameters(int8.parameters())
        answers = int8.predict(held_out.inputs()).argmax(1)
        expected = floating.predict(held_out.inputs()).argmax(1)
        # An evaluation measures the int8 answers.
        metrics = int8.evaluate(held_out.inputs(), held_out.targets())
        assert metrics["correct"] == (answers == held_out.targets()).sum()
        agreements.append((answers == expected).mean())
        moved.append((answers != published).mean())
    assert np.mean(agreements) >= 0.99, agreements
    assert min(agreements) >= 0.985, agreements
    # And it did follow: an int8 predict that stayed where it was would differ far more.
    assert np.mean(moved) > 3 * (1 - np.mean(agreements)), (moved, agreements)
