"""Pretrained networks from elsewhere (CNTK, old PyTorch exports): fine-tuning steps run and lower the loss."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from archipel import Model, training
from archipel.graph import check_model

DATA = Path(__file__).resolve().parents[3] / "shared" / "data" / "onnx_models"
STEPS = 10


@pytest.fixture(scope="session")
def folder() -> Path:
    if not DATA.is_dir():
        reason = f"needs the pretrained models in {DATA}"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    return DATA


@pytest.mark.sampled(every=3)
def test_one_picture_at_a_time(folder: Path) -> None:
    """opt_mnist (CNTK, opset 8) takes a batch of one, with pixels up to 255 and logits in the thousands."""
    with np.load(folder / "opt_mnist.ref.npz") as file:
        reference = dict(file)
    model = Model.from_onnx(folder / "opt_mnist.onnx")
    step = training.step_graph(model, training.losses.cross_entropy(label_smoothing=0.1), training.optimizers.sgd())
    check_model(step.ir)
    x, label = reference["in:Input3"][:1], reference["label"][:1]
    losses = training.run_steps(step, [(x, label)] * STEPS, {"lr": 1e-8})
    assert losses[-1] < losses[0]


@pytest.mark.sampled(every=4)
def test_a_convolutional_network(folder: Path) -> None:
    """cifar10_cnn_winml (PyTorch 1.7, opset 10) on 32 real pictures."""
    with np.load(folder / "cifar10_cnn_winml.ref.npz") as file:
        reference = dict(file)
    model = Model.from_onnx(folder / "cifar10_cnn_winml.onnx")
    step = training.step_graph(model, training.losses.cross_entropy(), training.optimizers.sgd(momentum=0.9))
    check_model(step.ir)
    losses = training.run_steps(step, [(reference["in:modelInput"], reference["label"])] * STEPS, {"lr": 0.002})
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("batch_norm", ["train", "frozen", "folded"])
def test_a_face_detector(folder: Path, batch_norm: str) -> None:
    """ultraface (PyTorch 1.2, opset 9): dilation, depthwise, 35 batch norms, weights that are graph inputs too, and
    shapes computed in the graph. Its scores are moved towards what they are not."""
    with np.load(folder / "ultraface_rfb_320.ref.npz") as file:
        reference = dict(file)
    model = Model.from_onnx(folder / "ultraface_rfb_320.onnx")
    assert [port.name for port in model.inputs] == ["input"]
    step = training.step_graph(model, training.losses.mse(), training.optimizers.sgd(), batch_norm=batch_norm)
    check_model(step.ir)
    wanted = 0.8 * reference["out:scores"] + 0.1
    losses = training.run_steps(step, [(reference["in:input"], wanted)] * 4, {"lr": 0.01})
    assert losses[-1] < losses[0]
