"""`step_options` of convert: the device's runtime makes the steps that the reference driver makes."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import nn

from archipel import Model, lite_runtime, training
from archipel.bundle import generate_key, role_of
from archipel.converter import Signing, Training, convert
from archipel.errors import ConversionError, TrainingError
from archipel.graph.build import Builder
from archipel.training import StepRunner, losses, optimizers, schedules, transforms
from archipel.training.context import StepContext
from archipel.training.step import StepOptions

KEY = generate_key()
LOSS = losses.cross_entropy(label_smoothing=0.1)


@pytest.fixture(scope="module")
def model() -> Model:
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Dropout(0.4), nn.Linear(108, 4)
    )
    return Model.from_torch(module, torch.zeros(2, 1, 8, 8))


@pytest.fixture(scope="module")
def data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.standard_normal((32, 1, 8, 8), np.float32), rng.integers(0, 4, 32)


OPTIONS: dict[str, tuple[optimizers.Optimizer, dict[str, Any]]] = {
    "transforms": (
        optimizers.sgd(momentum=0.9, lr=0.1),
        {"transforms": [transforms.clip_by_norm(0.5), transforms.proximal(0.3)]},
    ),
    "accumulate": (optimizers.adam(lr=schedules.cosine(0.05, 10)), {"accumulate": 2, "dropout": False}),
    "frozen": (optimizers.rmsprop(), {"batch_norm": "frozen"}),
    "folded": (optimizers.adamw(), {"batch_norm": "folded"}),
    "per_example": (optimizers.sgd(lr=0.5), {"per_example": training.per_example(0.3), "batch_norm": "frozen"}),
    "mixed": (optimizers.sgd(lr=0.1), {"precision": "mixed"}),
    "recompute": (optimizers.sgd(lr=0.1, momentum=0.9), {"recompute": "auto"}),
}


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize("name", OPTIONS)
def test_the_device_makes_these_steps(
    model: Model, data: tuple[np.ndarray, np.ndarray], tmp_path: Path, name: str
) -> None:
    optimizer, options = OPTIONS[name]
    bundle = convert(
        model, tmp_path / "b", training=Training(LOSS, optimizer, step_options=options), signing=Signing(KEY)
    )
    device, (x, y) = lite_runtime.Runtime(bundle), data
    found = device.fit(x, y, epochs=2, batch_size=8, shuffle=False, seed=5).losses
    runner = StepRunner(training.step_graph(model, LOSS, optimizer, **options), seed=5)
    batches = [(x[i : i + 8], y[i : i + 8]) for i in range(0, 32, 8)] * 2
    expected = [runner.step(batch)["loss"] for batch in batches]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    for tensor, value in device.parameters().items():
        np.testing.assert_allclose(value, runner.tensors[tensor], atol=1e-6, err_msg=tensor)
    assert device.evaluate(x, y)["correct"] == (device.predict(x).argmax(1) == y).sum()
    update = device.local_round(x, y, seed=1).arrays
    assert all(np.isfinite(array).all() for array in update.values())


@pytest.mark.sampled(every=3)
def test_noise_for_privacy_is_drawn_by_the_device(
    model: Model, data: tuple[np.ndarray, np.ndarray], tmp_path: Path
) -> None:
    bundle = convert(
        model, tmp_path / "b",
        training=Training(LOSS, optimizers.sgd(),
                          step_options={"per_example": training.per_example(0.3, noise=1.0), "batch_norm": "frozen"}),
        signing=Signing(KEY),
    )  # fmt: skip
    assert any(role_of(port) == "noise" for port in bundle.program("train").inputs)
    rounds = [lite_runtime.Runtime(bundle).local_round(*data, seed=1).parameters for _ in range(2)]
    assert not np.array_equal(rounds[0]["5.weight"], rounds[1]["5.weight"])


def test_every_option_of_a_step_is_one() -> None:
    arguments = inspect.signature(training.step_graph).parameters
    assert StepOptions.__optional_keys__ == set(arguments) - {"model", "loss", "optimizer", "trainable"}


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"lr": 0.1}, ConversionError, r"no option 'lr'; step_graph has accumulate, batch_norm, dropout, kernels, "),
        ({"trainable": "*"}, ConversionError, "no option 'trainable'"),
        ({"steps": 4}, ConversionError, r"steps=4, but devices hand one batch at a time .* use accumulate="),
        ({"steps": "4"}, ConversionError, "steps='4', but devices"),
        ({"batch_norm": "eval"}, TrainingError, "batch_norm must be 'train', 'frozen' or 'folded'"),
        ({"accumulate": 0}, TrainingError, "accumulate must be a whole number of 1 or more"),
        ({"per_example": training.per_example()}, TrainingError, "use batch_norm='frozen' or 'folded'"),
        (
            {"transforms": [transforms.proximal(0.1, "broadcast")]},
            ConversionError,
            "reads '0.bias' as a broadcast of the server, but strategy 'fedavg' does not broadcast it; use anchor=",
        ),
        (["accumulate"], ConversionError, r"step_options must be a mapping from name to value, is \['accumulate'\]"),
    ],
)
def test_options_that_do_not_fit(model: Model, tmp_path: Path, options: Any, error: type, text: str) -> None:
    with pytest.raises(error, match=text):
        convert(
            model, tmp_path / "b", training=Training(LOSS, optimizers.sgd(), step_options=options),
            signing=Signing(KEY),
        )  # fmt: skip
    assert list(tmp_path.iterdir()) == []


def test_prediction_of_a_model_that_was_exported_for_training(tmp_path: Path) -> None:
    """Dropout that is on, and normalization with the batch's statistics, are for `train` alone."""
    import onnx

    proto = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 21]>
        agraph (float[n, 2] x) => (float[n, 2] y)
        <float[2] s = {1, 2}, float[2] b = {0, 1}, float[2] m = {0.5, -0.5}, float[2] v = {1, 2}>
        { r = Constant <value = float {0.5}> () t = Constant <value = bool {1}> () d = Dropout (x, r, t)
          y, n, w = BatchNormalization <training_mode = 1> (d, s, b, m, v) }"""
    )
    model = Model.from_proto(proto)
    bundle = convert(model, tmp_path / "b", training=Training(losses.mse(), optimizers.sgd()), signing=Signing(KEY))
    x = np.random.default_rng(0).standard_normal((5, 2), np.float32)
    expected = (x - [0.5, -0.5]) / np.sqrt([1 + 1e-5, 2 + 1e-5]) * [1, 2] + [0, 1]
    np.testing.assert_allclose(lite_runtime.Runtime(bundle).predict(x), expected, rtol=1e-5, atol=1e-6)


class Counting:
    """Somebody's own optimizer, whose numbers are ints."""

    hyperparameters = (optimizers.HyperparameterSpec("rate", 1, 0, 10),)

    def init(self) -> tuple[optimizers.StateSpec, ...]:
        return (optimizers.StateSpec("steps", 1),)

    def update(
        self, op: Builder, parameter: ir.Value, gradient: ir.Value, state: Mapping[str, ir.Value], context: StepContext
    ) -> optimizers.Updated:
        moved = op.Sub(parameter, op.Mul(op.Div(gradient, state["steps"]), context.hyperparameters["rate"]))
        return optimizers.Updated(moved, {"steps": op.Add(state["steps"], 1.0)})


@pytest.mark.sampled(every=3)
def test_an_optimizer_of_ones_own(model: Model, data: tuple[np.ndarray, np.ndarray], tmp_path: Path) -> None:
    bundle = convert(
        model, tmp_path / "b", training=Training(LOSS, Counting(), step_options={"dropout": False}),
        signing=Signing(KEY),
    )  # fmt: skip
    device, (x, y) = lite_runtime.Runtime(bundle), data
    found = device.fit(x, y, epochs=3, batch_size=32, hyperparameters={"rate": 0.5}, shuffle=False).losses
    step = training.step_graph(model, LOSS, Counting(), dropout=False)
    np.testing.assert_allclose(found, training.run_steps(step, [data] * 3, {"rate": 0.5}), rtol=1e-5)
    assert found[2] < found[0]
