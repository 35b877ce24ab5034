"""The runtime with PyTorch on a GPU predicts and learns as with ONNX Runtime on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from archipel import Model, lite_runtime, training
from archipel import bundle as b
from archipel.compression import FineTune, QuantizationAware, StaticInt8, compress
from archipel.converter import Signing, Training, convert
from archipel.errors import DelegateError, IndexRangeError

pytestmark = pytest.mark.gpu
ENGINE = "torch:cuda"
RNG = np.random.default_rng(0)
X = RNG.standard_normal((40, 1, 8, 8), np.float32)
Y = RNG.integers(0, 4, 40)


def network() -> nn.Module:
    torch.manual_seed(0)
    # Without a bias before the normalization: its gradient is 0, of which Adam would make steps by rounding alone.
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 4)
    ).eval()


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    folder, signer = tmp_path_factory.mktemp("gpu"), b.generate_key()
    learning = Training(training.losses.cross_entropy(), training.optimizers.adam(), epochs=2, batch_size=8)
    convert(network(), folder / "m.bundle", example=X[:2], training=learning, signing=Signing(signer))
    trusted = [signer.public_key().public_bytes_raw()]

    def load(delegates: Any, **more: Any) -> Any:
        return lite_runtime.load(folder / "m.bundle", trusted, delegates=delegates, **more)

    return load


@pytest.mark.sampled(every=8)
def test_it_predicts_and_learns_as_onnx_runtime_does(load: Callable[..., Any]) -> None:
    runs = []
    for delegates in ("cpu", ENGINE):
        runtime = load(delegates)
        history = runtime.fit(X, Y, epochs=3, batch_size=12, seed=3, validation=(X, Y))
        update = runtime.local_round(X, Y, seed=5)
        runs.append((runtime.parameters(), dict(update.arrays), np.array(history.losses), runtime.predict(X)))
    expected, found = runs
    np.testing.assert_allclose(found[2], expected[2], atol=1e-4)
    np.testing.assert_allclose(found[3], expected[3], atol=1e-3)
    for ours, theirs in zip(found[:2], expected[:2]):
        assert ours.keys() == theirs.keys()
        for name, array in theirs.items():
            np.testing.assert_allclose(ours[name], array, atol=1e-3, err_msg=name)


@pytest.mark.sampled(every=6)
def test_a_confined_child_says_what_to_do_for_cuda(load: Callable[..., Any]) -> None:
    with (
        load(ENGINE, isolated=True) as runtime,
        pytest.raises(DelegateError, match="does not start with isolated=True"),
    ):
        runtime.fit(X, Y, batch_size=12)


def test_a_label_that_is_no_class_is_refused_before_it_ends_the_device(load: Callable[..., Any]) -> None:
    runtime = load(ENGINE)
    wrong = np.where(np.arange(len(Y)) == 7, 5, Y)
    with pytest.raises(IndexRangeError, match="row 7"):
        runtime.fit(X, wrong, batch_size=8)
    runtime.fit(X, Y, batch_size=8)


def test_training_in_a_recipe() -> None:
    tune = FineTune(steps=4, batch_size=16, augment="shift")
    model = Model.from_torch(network(), torch.zeros(2, 1, 8, 8))
    expected, found = (
        compress(model, [StaticInt8(), QuantizationAware(tune)], data=(X, Y), validation=(X, Y), engine=engine)
        for engine in ("onnxruntime", ENGINE)
    )
    ours, theirs = ((each[0].training_form or each[0]).parameters for each in (found, expected))
    assert ours.keys() == theirs.keys()
    for name, array in theirs.items():
        np.testing.assert_allclose(ours[name], array, atol=1e-4, err_msg=name)
