"""Mixed precision against float32, and its loss scale."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from torch import nn

from archipel import Model, training
from archipel.bundle.roles import role_of
from archipel.errors import TrainingError
from archipel.graph import check_model
from archipel.training import StepRunner, losses, optimizers, schedules

Batches = list[tuple[np.ndarray, np.ndarray]]
LOSS = losses.cross_entropy()


@pytest.fixture(scope="module")
def model() -> Model:
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 16), nn.ReLU(), nn.Linear(16, 4)
    )
    return Model.from_torch(module, torch.zeros(2, 1, 8, 8))


@pytest.fixture(scope="module")
def batches() -> Batches:
    """Four kinds of pictures under noise: something to learn."""
    rng = np.random.default_rng(0)
    kinds = rng.standard_normal((4, 1, 8, 8), np.float32)
    found = []
    for _ in range(30):
        y = rng.integers(0, 4, 16)
        found.append((kinds[y] + 0.5 * rng.standard_normal((16, 1, 8, 8), np.float32), y))
    return found


@pytest.mark.sampled(every=3)
def test_losses_follow_float32(model: Model, batches: Batches) -> None:
    exact, narrow = (
        training.step_graph(model, LOSS, optimizers.sgd(momentum=0.9, lr=0.03), precision=precision)
        for precision in ("float32", "mixed")
    )
    check_model(narrow.ir)
    expected, found = (np.array(training.run_steps(step, batches)) for step in (exact, narrow))
    assert expected[-1] < 0.2 * expected[0]
    # float16 keeps 11 bits, so 5e-4 of each product; less would mean that nothing ran in it.
    assert 1e-6 < np.abs(found - expected).max() < 0.02


def test_products_run_in_float16_and_weights_stay_float32(model: Model) -> None:
    step = training.step_graph(model, LOSS, optimizers.sgd(), precision="mixed")
    products = [n for n in step.ir.graph if n.op_type in ("Conv", "Gemm", "MatMul")]
    assert len(products) >= 8  # three forward, at least five backward
    assert all(node.outputs[0].dtype.numpy() == np.float16 for node in products)
    assert {port.dtype for port in step.signature.inputs if role_of(port) == "parameter"} == {"float32"}
    loss = next(node for node in step.ir.graph if node.op_type == "LogSoftmax")
    assert loss.outputs[0].dtype.numpy() == np.float32


def scalar_model() -> Model:
    """y = x w, one number: with the loss |y - 0| and a scale s the gradient in float16 is s x."""
    proto = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 21]>
        agraph (float[batch, 1] x) => (float[batch, 1] y) <float[1, 1] w> { y = MatMul (x, w) }"""
    )
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((1, 1), np.float32), "w"))
    return Model.from_proto(proto)


def run(step: Model, values: list[float]) -> list[tuple[float, float]]:
    """The weight and the scale after each step on a batch of one, in onnx.reference.

    ONNX Runtime on a CPU has no float16 products: it computes them in float32, where they do not overflow.
    """
    session = ReferenceEvaluator(ir.to_proto(step.ir))
    tensors, found = StepRunner(step).tensors, []
    rate = next(port.default for port in step.signature.inputs if port.name == "lr")
    for number, value in enumerate(values):
        feed = {"x": np.full((1, 1), value, np.float32), "label": np.zeros((1, 1), np.float32), **tensors}
        feed |= {"lr": np.array(rate, np.float32), "step": np.array(number)}
        names = [port.name for port in step.signature.inputs]
        with np.errstate(over="ignore", invalid="ignore"):
            results = session.run(None, {name: feed[name] for name in names})
        for port, result in zip(step.signature.outputs, results):
            if role_of(port) != "metric":
                tensors[port.tensor] = result
        found.append((tensors["w"].item(), tensors["loss_scale"].item()))
    return found


def test_an_overflow_skips_the_step_and_halves_the_scale() -> None:
    step = training.step_graph(
        scalar_model(), losses.l1(), optimizers.sgd(lr=0.1), precision=training.mixed(2.0**15, growth_interval=3)
    )
    check_model(step.ir)
    # float16 ends at 65504: 2**15 * 2 overflows, 2**14 * 2 does not. Three good steps in a row double the scale.
    found = run(step, [1.0, 2.0, 2.0, 1.0, 1.0, 1.0, float("nan"), 1.0])
    weights = [0.9, 0.9, 0.7, 0.6, 0.5, 0.4, 0.4, 0.3]
    scales = [15, 14, 14, 14, 15, 15, 14, 14]
    np.testing.assert_allclose([w for w, _ in found], weights, rtol=1e-3)
    np.testing.assert_array_equal([s for _, s in found], 2.0 ** np.array(scales))


def test_the_scale_stays_in_its_bounds() -> None:
    for scale, value in ((1.0, np.nan), (2.0**24, 1e-4)):
        options = training.mixed(scale, growth_interval=1)
        step = training.step_graph(scalar_model(), losses.l1(), optimizers.sgd(lr=0.1), precision=options)
        runner = StepRunner(step)
        rows = np.full((10000, 1), value, np.float32)
        for _ in range(2):
            runner.step((rows, np.zeros_like(rows)))
            assert runner.tensors["loss_scale"] == scale
        assert (runner.tensors["w"] == 1) == np.isnan(value)


def test_small_gradients_survive() -> None:
    """1e-6 times a cotangent of 1e-4 is nothing in float16; scaled it is something."""
    step = training.step_graph(scalar_model(), losses.l1(), optimizers.sgd(lr=100.0), precision="mixed")
    runner = StepRunner(step)
    rows = np.full((10000, 1), 2e-6, np.float32)
    runner.step([rows, np.zeros_like(rows)])
    assert 1 - runner.tensors["w"].item() == pytest.approx(2e-4, rel=0.05)


def test_skipped_steps_do_not_count() -> None:
    rate = schedules.step_decay(0.1, every=1, gamma=0.5)
    step = training.step_graph(scalar_model(), losses.l1(), optimizers.sgd(lr=rate), precision=training.mixed(2.0**15))
    found = run(step, [1.0, 2.0, 1.0])
    np.testing.assert_allclose([w for w, _ in found], [0.9, 0.9, 0.85], rtol=1e-3)
    assert not any(role_of(port) == "step" for port in step.signature.inputs)


def test_with_accumulation_the_scale_changes_with_the_updates() -> None:
    step = training.step_graph(
        scalar_model(), losses.l1(), optimizers.sgd(lr=0.1), accumulate=2, precision=training.mixed(2.0**15)
    )
    check_model(step.ir)
    found = run(step, [1.0, 1.5, 2.0, 1.0, 1.0, 1.0])
    np.testing.assert_allclose([w for w, _ in found], [1.0, 0.875, 0.875, 0.875, 0.875, 0.775], rtol=1e-3)
    np.testing.assert_array_equal([s for _, s in found], 2.0 ** np.array([15, 15, 15, 14, 14, 14]))


@pytest.mark.sampled(every=3)
def test_per_example_gradients_in_mixed_precision(model: Model, batches: Batches) -> None:
    options = {"per_example": training.per_example(0.5)}
    exact, narrow = (
        training.step_graph(model, LOSS, optimizers.sgd(lr=0.2), precision=precision, **options)
        for precision in ("float32", "mixed")
    )
    found, expected = (training.run_steps(step, batches[:6]) for step in (narrow, exact))
    np.testing.assert_allclose(found, expected, atol=0.01)


@pytest.mark.sampled(every=3)
def test_running_statistics_stay_as_they_are_in_a_skipped_step() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    step = training.step_graph(Model.from_torch(module, torch.zeros(2, 3)), LOSS, optimizers.sgd(), precision="mixed")
    check_model(step.ir)
    runner = StepRunner(step)
    x = np.random.default_rng(0).standard_normal((8, 3)).astype(np.float32)
    for scale, moves in ((1.0, True), (np.inf, False), (1.0, True)):
        before = dict(runner.tensors)
        runner.step((x * np.float32(scale), np.zeros(8, np.int64)))
        for name in ("0.weight", "1.running_mean", "1.running_var"):
            assert np.isfinite(runner.tensors[name]).all()
            assert np.array_equal(runner.tensors[name], before[name]) != moves, name


@pytest.mark.sampled(every=3)
def test_what_cannot_be_narrowed(model: Model) -> None:
    with pytest.raises(TrainingError, match=r"must be 'float32', 'mixed' or training.mixed\(...\), is 'half'"):
        training.step_graph(model, LOSS, optimizers.sgd(), precision="half")
    double = Model.from_torch(nn.Linear(3, 2).double(), torch.zeros(2, 3, dtype=torch.float64))
    with pytest.raises(TrainingError, match="the model has no float32 Conv, ConvTranspose, Gemm, MatMul"):
        training.step_graph(double, LOSS, optimizers.sgd(), precision="mixed")
    with pytest.raises(TrainingError, match="mixed: scale must be from 1 to"):
        training.mixed(0.5)
    with pytest.raises(TrainingError, match="growth_interval must be a whole number of 1 or more"):
        training.mixed(growth_interval=0)
