"""Which output the loss reads, and what a conversion says that it decided on its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from archipel.bundle import Bundle, generate_key
from archipel.bundle.roles import Output, Prediction
from archipel.compression import StaticInt8, compress
from archipel.converter import Signing, Training, convert
from archipel.errors import ConversionError, TrainingError
from archipel.graph import Model
from archipel.graph.report import conversion_notes
from archipel.lite_runtime import load
from archipel.training import losses, optimizers

KEY = generate_key()
X = np.random.default_rng(1).standard_normal((24, 1, 6, 6)).astype(np.float32)
Y = np.random.default_rng(2).integers(0, 3, 24)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm = torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4)
        self.head = torch.nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.head(torch.relu(self.norm(self.conv(x))).mean((2, 3)))
        return torch.softmax(logits, 1), logits


@pytest.fixture(scope="module")
def model() -> Model:
    model = Model.from_torch(Net().eval(), torch.zeros(2, 1, 6, 6))
    for value, name in zip(model.ir.graph.outputs, ("probabilities", "logits")):
        value.name = name
    return model


def made(model: Model, path: Path, loss: Any = None, **training: Any) -> Bundle:
    arguments = {"loss_output": "logits", **training}
    return convert(
        model,
        path,
        training=Training(loss or losses.cross_entropy(), optimizers.sgd(lr=0.1), **arguments),
        signing=Signing(KEY),
    )


def notes(bundle: Bundle) -> tuple[str, ...]:
    import onnx
    import onnx_ir as ir

    return conversion_notes(ir.from_proto(onnx.load(bundle.program_path("predict"), load_external_data=False)))


def cross_entropy(logits: np.ndarray) -> float:
    return float(torch.nn.functional.cross_entropy(torch.from_numpy(logits), torch.from_numpy(Y)))


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.sampled(every=4)
def test_the_loss_reads_the_output_that_was_named(model: Model, compressed: bool, tmp_path: Path) -> None:
    source = compress(model, [StaticInt8()], calibration={model.inputs[0].name: X})[0] if compressed else model
    bundle = made(source, tmp_path / "b")
    predict, evaluate = bundle.manifest.programs["predict"], bundle.manifest.programs["evaluate"]
    assert [port.name for port in predict.outputs if isinstance(port, Output)] == ["logits", "probabilities"]
    assert [port.output for port in evaluate.inputs if isinstance(port, Prediction)] == ["logits"]
    runtime = load(bundle.folder, [KEY.public_key().public_bytes_raw()])
    logits = runtime.predict({model.inputs[0].name: X})["logits"]
    assert runtime.evaluate(X, Y)["loss"] / len(X) == pytest.approx(cross_entropy(logits), rel=1e-5)
    history = runtime.fit(X, Y, epochs=1, batch_size=24)
    with torch.no_grad():
        expected = cross_entropy(Net().train()(torch.from_numpy(X))[1].numpy())
    # The training form, which normalizes with the batch, before its first step.
    assert history.metrics["loss"][0] == pytest.approx(expected, rel=1e-4)


@pytest.mark.sampled(every=3)
def test_an_output_that_the_model_does_not_have(model: Model, tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match="no output 'votes'; its outputs are probabilities, logits"):
        made(model, tmp_path / "b", loss_output="votes")


def test_a_softmax_beside_its_logits(model: Model, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"is a softmax already .* pass loss_output='logits'"):
        made(model, tmp_path / "b", loss_output=None)


@pytest.mark.sampled(every=4)
def test_notes_say_what_was_decided(model: Model, tmp_path: Path) -> None:
    assert notes(made(model, tmp_path / "train", losses.mse(), loss_output=None, trainable="head.*")) == (
        "BatchNormalization: 1 of 1 are computed into the layers before them in predict",
        "BatchNormalization: a step normalizes with its batch; running mean and variance are averaged over the devices",
        "the loss reads the output 'probabilities', the first of 2; loss_output= chooses another",
        "devices train 2 of the model's 6 tensors (15 of 63 numbers)",
    )
    frozen = notes(made(model, tmp_path / "frozen", trainable="head.*", step_options={"batch_norm": "frozen"}))
    assert frozen[1:3] == (
        "BatchNormalization: training normalizes with the model's running mean and variance, which stay",
        "the loss reads the output 'logits', the first of 2, as loss_output= asks",
    )
    assert (
        frozen[-1] == "no training changes the layers before those: a device runs them once for each example (features)"
    )
    adapters = notes(made(model, tmp_path / "lora", strategy="lora", strategy_options={"targets": "conv.weight"}))
    assert "devices train 2 new tensors (52 numbers) and 0 of the model's 6 (0 of 63)" in adapters


@pytest.mark.sampled(every=4)
def test_a_note_says_what_kernels_are_for(model: Model, tmp_path: Path) -> None:
    with_kernels = {"step_options": {"kernels": True}}
    # The convolution and the gradient of its weight, BatchNormalization and its gradient, and Relu's.
    assert notes(made(model, tmp_path / "all", **with_kernels))[-1] == (
        "the kernel pack has operators for 5 nodes of a step; devices without it run their bodies"
    )
    assert "the kernel pack has no operator for this model's training: kernels changes nothing" in notes(
        made(model, tmp_path / "head", trainable="head.*", **with_kernels)
    )


def test_without_training_there_is_little_to_say(model: Model, tmp_path: Path) -> None:
    assert notes(convert(model, tmp_path / "b", signing=Signing(KEY))) == (
        "BatchNormalization: 1 of 1 are computed into the layers before them in predict",
    )
