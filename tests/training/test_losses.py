"""Losses and their gradients against PyTorch, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from torch.nn import functional as F

from archipel.autodiff import differentiate
from archipel.errors import TrainingError
from archipel.graph import check_model
from archipel.graph.build import Builder
from archipel.graph.passes import remove_dead_code, share_subexpressions
from archipel.training import losses

TYPES: dict[type[np.floating], float] = {np.float32: 1e-5, np.float64: 1e-12}
CLASS_WEIGHTS = [0.5, 2.0, 0.0, 1.0, 3.0]
Reference = Callable[..., torch.Tensor]


def graph(loss: losses.Loss, shape: list, dtype: type[np.floating]) -> ir.Model:
    """Outputs: values, objective, gradient of the objective, counted and, where there is one, correct."""
    g = ir.Graph([], [], nodes=[], opset_imports={"": 21}, name="loss")
    op = Builder(g)
    output = op.input("x", ir.DataType.from_numpy(np.dtype(dtype)), shape)
    kind, sizes = loss.label(output)
    label = op.input("label", kind, sizes)
    values = loss.values(op, output, label)
    objective = losses.objective(op, loss, output, label)
    (gradient,) = differentiate(op, {objective: op.constant(np.ones((), dtype))}, [output])
    found = {
        "values": values,
        "objective": objective,
        "gradient": gradient,
        "counted": losses.counted(op, values, loss.weights(op, output, label)),
        "correct": loss.correct(op, output, label),
    }
    for name, value in found.items():
        if value is not None:
            op.name_output(op.Identity(value), name)
    model = ir.Model(g, ir_version=10)
    remove_dead_code(model)
    share_subexpressions(model)
    check_model(model)
    return model


def run(model: ir.Model, feed: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), options)
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, feed)))


@dataclass
class Case:
    """A loss, and PyTorch's of (output, label) for each `reduction`."""

    loss: losses.Loss
    torch: Reference
    label: Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]
    shapes: tuple[tuple[int, ...], ...] = ((6, 5), (1, 5), (3, 5, 2), (2, 5, 3, 2))


def classes(axis: int = 1, ignored: int | None = None) -> Callable:
    def draw(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        labels = rng.integers(0, shape[axis], np.delete(shape, axis))
        if ignored is not None:
            labels.reshape(-1)[1::2] = ignored
        return labels

    return draw


def cross_entropy(axis: int = 1, ignored: int | None = None, **arguments: Any) -> Case:
    given = dict(arguments)
    if ignored is not None:
        given["ignore_index"] = ignored

    def reference(x: torch.Tensor, label: torch.Tensor, reduction: str) -> torch.Tensor:
        weight = arguments.get("class_weights")
        return F.cross_entropy(
            x.movedim(axis, 1),
            label,
            weight=None if weight is None else torch.tensor(weight, dtype=x.dtype),
            label_smoothing=arguments.get("label_smoothing", 0.0),
            ignore_index=-100 if ignored is None else ignored,
            reduction=reduction,
        )

    shapes = ((6, 5), (1, 5), (3, 2, 5), (2, 3, 2, 5)) if axis == -1 else Case.shapes
    return Case(losses.cross_entropy(axis=axis, **given), reference, classes(axis, ignored), shapes)


def probabilities(rng: np.random.Generator, shape: tuple[int, ...], axis: int) -> np.ndarray:
    """Distributions along the axis, with zeros in them."""
    drawn = np.where(rng.random(shape) < 0.3, 0.0, rng.random(shape))
    np.moveaxis(drawn, axis, 0)[0] += 0.1
    return drawn / drawn.sum(axis, keepdims=True)


def divergence(log_target: bool, axis: int = 1) -> Case:
    def reference(x: torch.Tensor, label: torch.Tensor, reduction: str) -> torch.Tensor:
        each = F.kl_div(x.log_softmax(axis), label, reduction="none", log_target=log_target).sum(axis)
        return each if reduction == "none" else each.mean()

    def draw(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        drawn = probabilities(rng, shape, axis)
        return np.log(drawn + 1e-3) if log_target else drawn

    return Case(losses.kl_divergence(log_target=log_target, axis=axis), reference, draw)


def binary(pos_weight: float | list[float] = 1.0) -> Case:
    def reference(x: torch.Tensor, label: torch.Tensor, reduction: str) -> torch.Tensor:
        weight = torch.tensor(pos_weight, dtype=x.dtype)
        return F.binary_cross_entropy_with_logits(x, label, pos_weight=weight, reduction=reduction)

    def draw(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        labels = rng.integers(0, 2, shape).astype(np.float64)
        labels.reshape(-1)[0] = 0.3
        return labels

    return Case(losses.binary_cross_entropy(pos_weight), reference, draw, ((7,), (6, 3), (2, 4, 3)))


def regression(loss: losses.Loss, reference: Reference) -> Case:
    return Case(loss, reference, lambda rng, shape: 2 * rng.standard_normal(shape), ((7,), (6, 3), (2, 4, 3)))


CASES = {
    "cross_entropy": cross_entropy(),
    "cross_entropy, axis=-1": cross_entropy(axis=-1),
    "cross_entropy, smoothed": cross_entropy(label_smoothing=0.1),
    "cross_entropy, uniform": cross_entropy(label_smoothing=1.0),
    "cross_entropy, weighted": cross_entropy(class_weights=CLASS_WEIGHTS),
    "cross_entropy, weighted and smoothed": cross_entropy(class_weights=CLASS_WEIGHTS, label_smoothing=0.3),
    "cross_entropy, ignored -100": cross_entropy(ignored=-100),
    "cross_entropy, ignored class 2": cross_entropy(ignored=2, label_smoothing=0.2),
    "cross_entropy, everything": cross_entropy(-1, -1, class_weights=CLASS_WEIGHTS, label_smoothing=0.3),
    "binary_cross_entropy": binary(),
    "binary_cross_entropy, weighted": binary(2.5),
    "binary_cross_entropy, weight by place": Case(
        **{**vars(binary([0.5, 1.0, 3.0])), "shapes": ((6, 3), (2, 4, 3))},
    ),
    "mse": regression(losses.mse(), F.mse_loss),
    "l1": regression(losses.l1(), F.l1_loss),
    "huber": regression(losses.huber(), F.huber_loss),
    "huber, delta=0.3": regression(
        losses.huber(0.3), lambda x, y, reduction: F.huber_loss(x, y, delta=0.3, reduction=reduction)
    ),
    "kl_divergence": divergence(log_target=False),
    "kl_divergence, axis=-1": divergence(log_target=False, axis=-1),
    "kl_divergence, log_target": divergence(log_target=True),
}


@pytest.mark.parametrize("free", [False, True], ids=["fixed", "symbolic"])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled(every=6)
def test_values_mean_and_gradient_are_pytorchs(name: str, dtype: type[np.floating], free: bool) -> None:
    case = CASES[name]
    rng = np.random.default_rng(0)
    for shape in case.shapes:
        x = (3 * rng.standard_normal(shape)).astype(dtype)
        label = case.label(rng, shape)
        label = label if label.dtype == np.int64 else label.astype(dtype)
        found = run(graph(case.loss, ["batch", *shape[1:]] if free else list(shape), dtype), {"x": x, "label": label})
        tensor = torch.from_numpy(x).requires_grad_()
        values = case.torch(tensor, torch.from_numpy(label), reduction="none")
        mean = case.torch(tensor, torch.from_numpy(label), reduction="mean")
        (gradient,) = torch.autograd.grad(mean, tensor)
        for key, expected in (("values", values), ("objective", mean), ("gradient", gradient)):
            theirs = expected.detach().numpy()
            assert found[key].shape == theirs.shape
            assert found[key].dtype == dtype
            np.testing.assert_allclose(found[key], theirs, rtol=TYPES[dtype], atol=TYPES[dtype] * np.abs(theirs).max())


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", ["binary_cross_entropy", "cross_entropy", "cross_entropy, smoothed"])
def test_large_logits_stay_finite(name: str, dtype: type[np.floating]) -> None:
    case = CASES[name]
    x = np.array([[1e4, -1e4, 0.0], [-1e3, 80.0, 1e3]], dtype)
    label = np.array([1, 2]) if name.startswith("cross") else np.array([[0, 1, 0], [0, 1, 1]], dtype)
    found = run(graph(case.loss, list(x.shape), dtype), {"x": x, "label": label})
    tensor = torch.from_numpy(x).requires_grad_()
    mean = case.torch(tensor, torch.from_numpy(label), reduction="mean")
    (gradient,) = torch.autograd.grad(mean, tensor)
    np.testing.assert_allclose(found["objective"], mean.item(), rtol=TYPES[dtype])
    np.testing.assert_allclose(found["gradient"], gradient.numpy(), rtol=TYPES[dtype], atol=TYPES[dtype])


def test_infinite_logits_of_ignored_labels_do_not_matter() -> None:
    x = np.array([[1.0, 2.0, -np.inf], [-np.inf, 0.0, 1.0]], np.float32)
    found = run(graph(losses.cross_entropy(ignore_index=-1), [2, 3], np.float32), {"x": x, "label": np.array([1, -1])})
    assert found["objective"] == pytest.approx(np.log(1 + np.exp(-1.0)))
    assert found["gradient"][1] == pytest.approx(np.zeros(3))


@pytest.mark.parametrize("axis", [1, -1])
def test_correct_counts_only_what_counts(axis: int) -> None:
    best = np.array([[0, 1, 2, 3], [2, 2, 4, 0]])
    x = np.moveaxis(np.eye(5, dtype=np.float32)[best], -1, axis)
    label = np.array([[0, 4, 2, -7], [2, 3, 4, -7]])
    loss = losses.cross_entropy(class_weights=CLASS_WEIGHTS, ignore_index=-7, axis=axis)
    found = run(graph(loss, list(x.shape), np.float32), {"x": x, "label": label})
    # Class 2 weighs nothing.
    assert found["correct"].tolist() == [[True, False, False, False], [False, False, True, False]]
    assert found["counted"] == 4
    plain = run(graph(losses.cross_entropy(axis=axis), list(x.shape), np.float32), {"x": x, "label": label % 5})
    assert plain["correct"].tolist() == [[True, False, True, True], [True, False, True, False]]
    assert plain["counted"] == 8


def test_a_class_that_is_ignored_is_never_correct() -> None:
    x = np.eye(3, dtype=np.float32)
    loss = losses.cross_entropy(ignore_index=0)
    found = run(graph(loss, ["n", 3], np.float32), {"x": x, "label": np.array([0, 1, 1])})
    assert found["correct"].tolist() == [False, True, False]
    assert found["counted"] == 2


def test_binary_labels_are_met_on_their_side_of_zero() -> None:
    x = np.array([1.0, -1.0, 1.0, -1.0, 0.0, 0.25, 0.25, -0.25, 0.25], np.float32)  # sigmoid(0.25) is above 0.56
    label = np.array([1.0, 0.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.4, 0.6], np.float32)
    found = run(graph(losses.binary_cross_entropy(), [9], np.float32), {"x": x, "label": label})
    assert found["correct"].tolist() == [True, True, False, False, True, True, False, True, True]


def test_distributions_are_counted_not_their_classes() -> None:
    feed = {"x": np.zeros((4, 3), np.float32), "label": np.full((4, 3), 1 / 3, np.float32)}
    assert run(graph(losses.kl_divergence(), ["n", 3], np.float32), feed)["counted"] == 4


@pytest.mark.parametrize(
    ("loss", "shape", "expected"),
    [
        (losses.cross_entropy(), ["batch", 10], (ir.DataType.INT64, ["batch"])),
        (losses.cross_entropy(), [32, 10, None], (ir.DataType.INT64, [32, "label_dim2"])),
        (losses.cross_entropy(axis=-1), ["batch", "time", 10], (ir.DataType.INT64, ["batch", "time"])),
        (losses.mse(), ["batch", 3, None], (ir.DataType.DOUBLE, ["batch", 3, "label_dim2"])),
        (losses.binary_cross_entropy(), [4, "n"], (ir.DataType.DOUBLE, [4, "n"])),
        (losses.kl_divergence(), ["batch", 3], (ir.DataType.DOUBLE, ["batch", 3])),
    ],
)
def test_labels_keep_symbolic_sizes(loss: losses.Loss, shape: list, expected: tuple) -> None:
    output = ir.Value(name="y", type=ir.TensorType(ir.DataType.DOUBLE), shape=ir.Shape(shape))
    dtype, sizes = loss.label(output)
    assert (dtype, list(sizes)) == expected


@pytest.mark.parametrize(
    ("loss", "dtype", "shape", "message"),
    [
        (losses.cross_entropy(), "FLOAT", ["n"], r"cross_entropy: .*\[batch, classes, ...\], the output 'y' .*\['n'\]"),
        (losses.cross_entropy(), "INT64", ["n", 3], "expected floating-point logits .* type INT64"),
        (losses.cross_entropy(axis=2), "FLOAT", ["n", 3], r"classes along axis 2, .* shape \['n', 3\]"),
        (losses.cross_entropy(class_weights=[1, 2]), "FLOAT", ["n", 3], "2 class_weights, .* 3 classes along axis 1"),
        (losses.kl_divergence(axis=-3), "FLOAT", ["n", 3], "kl_divergence: .* axis -3"),
        (losses.binary_cross_entropy([1, 2]), "FLOAT", ["n", 3], r"2 numbers in pos_weight .* \['n', 3\]"),
        (losses.binary_cross_entropy([1, 2]), "FLOAT", [], "2 numbers in pos_weight"),
        (losses.binary_cross_entropy(), "INT64", ["n"], "binary_cross_entropy: .* 'y' is INT64"),
        (losses.mse(), "INT32", ["n"], "mse: expected a floating-point output"),
        (losses.l1(), "INT32", ["n"], "l1: expected a floating-point output"),
        (losses.huber(), "BOOL", ["n"], "huber: expected a floating-point output"),
    ],
)
def test_outputs_that_do_not_fit(loss: losses.Loss, dtype: str, shape: list, message: str) -> None:
    output = ir.Value(name="y", type=ir.TensorType(ir.DataType[dtype]), shape=ir.Shape(shape))
    with pytest.raises(TrainingError, match=message):
        loss.label(output)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: losses.cross_entropy(1.5), "label_smoothing must be from 0 to 1, is 1.5"),
        (lambda: losses.cross_entropy(True), "label_smoothing must be from 0 to 1, is True"),
        (lambda: losses.cross_entropy(class_weights=[1, -1]), r"class_weights\[1\] must be at least 0, is -1"),
        (lambda: losses.cross_entropy(class_weights=[0, 0]), "class_weights must have a number above 0"),
        (lambda: losses.cross_entropy(class_weights=[]), "class_weights must have a number above 0"),
        (lambda: losses.cross_entropy(ignore_index=0.5), "ignore_index must be a whole number, is 0.5"),
        (lambda: losses.cross_entropy(axis=None), "axis must be a whole number, is None"),
        (lambda: losses.binary_cross_entropy(float("nan")), "pos_weight must be at least 0, is nan"),
        (lambda: losses.binary_cross_entropy("1"), "pos_weight must be at least 0, is '1'"),
        (lambda: losses.cross_entropy(class_weights=3), "class_weights must be a list of numbers, is 3"),
        (lambda: losses.cross_entropy(class_weights="abc"), "class_weights must be a list of numbers, is 'abc'"),
        (lambda: losses.kl_divergence("no"), "kl_divergence: log_target must be True or False, is 'no'"),
        (lambda: losses.huber(0), "delta must be above 0, is 0"),
        (lambda: losses.huber(float("inf")), "delta must be above 0, is inf"),
        (lambda: losses.kl_divergence(axis="1"), "kl_divergence: axis must be a whole number, is '1'"),
    ],
)
def test_arguments_are_checked(make: Callable[[], losses.Loss], message: str) -> None:
    with pytest.raises(TrainingError, match=message):
        make()


@pytest.mark.parametrize(
    ("loss", "activation", "shape"),
    [
        (losses.cross_entropy(), "Softmax", ["n", 3]),
        (losses.kl_divergence(), "Softmax", ["n", 3]),
        (losses.binary_cross_entropy(), "Sigmoid", ["n", 3]),
    ],
)
def test_probabilities_are_no_logits(loss: losses.Loss, activation: str, shape: list) -> None:
    op = Builder(ir.Graph([], [], nodes=[], opset_imports={"": 21}, name="loss"))
    logits = op.input("logits", ir.DataType.FLOAT, shape)
    output = op.name_output(op.Identity(getattr(op, activation)(logits)), "probabilities")
    with pytest.raises(TrainingError) as error:
        loss.label(output)
    text = str(error.value)
    assert f"'probabilities' is a {activation.lower()} already ({activation} " in text
    assert "let it read the value before it, 'logits': export the model without its last" in text
    assert text.endswith("; or choose the loss mse, which may read probabilities") == (activation == "Sigmoid")
    mean = op.ReduceMean(op.Unsqueeze(getattr(op, activation)(logits), [-1]), [-1], keepdims=0)
    with pytest.raises(TrainingError, match=f"is a {activation.lower()} already"):
        loss.label(mean)
    loss.label(logits)
    loss.label(op.Softmax(logits, axis=0))  # over the batch: no probabilities of classes
    # The logarithm of a softmax is its own: that of PyTorch's nll_loss gives the same loss.
    losses.cross_entropy().label(op.LogSoftmax(logits, axis=1))


def test_one_logit_has_no_softmax() -> None:
    op = Builder(ir.Graph([], [], nodes=[], opset_imports={"": 21}, name="loss"))
    logit = op.input("logit", ir.DataType.FLOAT, ["n", 1])
    with pytest.raises(TrainingError, match=r"'logit' has one logit.*; use binary_cross_entropy, with labels"):
        losses.cross_entropy().label(logit)
    losses.binary_cross_entropy().label(logit)
