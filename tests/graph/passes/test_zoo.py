"""Passes for prediction over whole networks: the same answers on ONNX Runtime, no fewer parameters, and fewer nodes."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch

from archipel import Model, models
from archipel.graph import check_model
from archipel.graph.passes.inference import optimize_for_inference
from archipel.training.folding import fold_batch_norm_symbolic

DATA = Path(__file__).resolve().parents[4] / "shared" / "data" / "onnx_models"

TOKENS = torch.arange(24).reshape(2, 12)


def picture(*shape: int) -> torch.Tensor:
    return torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))


# name: (network, example, operators that must be gone)
NETWORKS: dict[str, tuple[Callable[[], torch.nn.Module], torch.Tensor, set[str]]] = {
    "1D-CNN": (lambda: models.cnn_1d(0), picture(6, 128), {"Squeeze"}),
    "LSTM": (lambda: models.char_rnn(0, hidden=16), TOKENS, {"Shape", "Expand"}),
    "GRU": (lambda: models.char_rnn(0, "gru", hidden=16), TOKENS, {"Shape", "Expand"}),
    "Transformer": (lambda: models.transformer(0, width=32), TOKENS, {"Shape", "Where", "Trilu"}),
    "DS-CNN": (lambda: models.ds_cnn(0, filters=16), picture(1, 49, 10), {"BatchNormalization", "ReduceMean"}),
    "ResNet-8": (lambda: models.resnet8(0), picture(3, 32, 32), {"BatchNormalization", "ReduceMean"}),
    "MobileNetV2": (
        lambda: models.mobilenet_v2(0, width=0.25), picture(3, 32, 32), {"BatchNormalization", "ReduceMean"}
    ),
    "U-Net": (lambda: models.unet(0), picture(1, 32, 32), set()),
    "Autoencoder": (lambda: models.autoencoder(0), picture(1, 28, 28), {"Mul"}),
    "LeNet": (lambda: models.lenet(0), picture(1, 28, 28), set()),
    "MLP": (lambda: models.mlp(0), picture(784), set()),
}  # fmt: skip
QUICK = ("1D-CNN",)


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in NETWORKS])
@pytest.mark.sampled(every=4)
def test_a_network(name: str) -> None:
    make, example, gone = NETWORKS[name]
    network = make()
    for key, value in network.state_dict().items():
        if key.endswith("running_var"):
            value.uniform_(0.5, 2.0, generator=torch.Generator().manual_seed(1))
    check(Model.from_torch(network, example), example.numpy(), gone)


@pytest.mark.parametrize("name", ["cifar10_cnn_winml", "opt_mnist", "ultraface_rfb_320"])
@pytest.mark.sampled(every=4)
def test_a_network_from_elsewhere(name: str) -> None:
    if not DATA.is_dir():
        reason = f"needs the pretrained models in {DATA}"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    model = Model.from_onnx(DATA / f"{name}.onnx")
    with np.load(DATA / f"{name}.ref.npz") as reference:
        x = next(reference[key] for key in reference.files if key.startswith("in:"))
    free = isinstance(model.inputs[0].shape[0], str)
    check(model, x if free else x[: int(model.inputs[0].shape[0])], {"BatchNormalization", "Shape"})


def check(model: Model, x: np.ndarray, gone: set[str]) -> None:
    optimized = model.copy()
    fold_batch_norm_symbolic(optimized.ir)
    optimize_for_inference(optimized.ir, keep=set(model.parameter_names))
    check_model(optimized.ir)
    assert optimized.inputs == model.inputs
    assert optimized.outputs == model.outputs
    operators = Counter(node.op_type for node in optimized.ir.graph)
    assert not gone & operators.keys()
    kept = optimized.parameters
    for key, values in model.parameters.items():
        np.testing.assert_array_equal(kept.get(key, values), values)
    feed = {model.inputs[0].name: x}
    for found, expected in zip(run(optimized, feed), run(model, feed)):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


def run(model: Model, feed: dict[str, np.ndarray]) -> list[np.ndarray]:
    # Without ONNX Runtime's own passes, which would do some of the same.
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(model.to_bytes(), options).run(None, feed)
