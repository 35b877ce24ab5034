"""What the rules' contract cannot see: derivatives at kinks and poles, which are PyTorch's, and second derivatives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from gradient_cases.reference import evaluator
from onnx import TensorProto, helper
from torch.nn import functional as F

from archipel import Model, autodiff
from archipel.graph import check_model

INF = float("inf")


def one_node(op_type: str, inputs: list, attributes: dict[str, Any]) -> Model:
    """x0, x1, ... -> y, in float64 where they are floating point."""
    arrays = [np.asarray(value) for value in inputs]
    ports = [
        helper.make_tensor_value_info(f"x{i}", helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
        for i, a in enumerate(arrays)
    ]
    node = helper.make_node(op_type, [port.name for port in ports], ["y"], name="node", **attributes)
    result = helper.make_tensor_value_info("y", TensorProto.DOUBLE, None)
    graph = helper.make_graph([node], "one", ports, [result])
    return Model.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10))


def gradients(op_type: str, inputs: list, attributes: dict[str, Any]) -> list[np.ndarray]:
    """Of the sum of y, in each floating-point input."""
    wanted = [f"x{i}" for i, value in enumerate(inputs) if np.asarray(value).dtype.kind == "f"]
    model = one_node(op_type, inputs, attributes)
    derived = autodiff.vjp(model, of=["y"], wrt=wanted)
    feed = {f"x{i}": np.asarray(value) for i, value in enumerate(inputs)}
    y = evaluator(model.to_bytes()).run(["y"], feed)[0]
    with np.errstate(all="ignore"):
        return evaluator(derived.to_bytes()).run(
            [f"{name}.grad" for name in wanted], {**feed, "y.cotangent": np.ones_like(y)}
        )


KINKS: dict[str, tuple[list, dict[str, Any], Callable[..., torch.Tensor]]] = {
    "Relu": ([[-0.0, 0.0]], {}, torch.relu),
    "LeakyRelu": ([[0.0]], {"alpha": 0.25}, lambda x: F.leaky_relu(x, 0.25)),
    "PRelu": ([[0.0, 1.0], [0.25]], {}, F.prelu),
    "Elu": ([[0.0]], {"alpha": 0.5}, lambda x: F.elu(x, 0.5)),
    "Selu": ([[0.0]], {}, F.selu),
    "HardSigmoid": ([[-3.0, 3.0]], {"alpha": 1 / 6, "beta": 0.5}, F.hardsigmoid),
    "HardSwish": ([[-3.0, 3.0]], {}, F.hardswish),
    "Abs": ([[0.0]], {}, torch.abs),
    "Sign": ([[0.0]], {}, torch.sign),
    "Floor": ([[1.0]], {}, torch.floor),
    "Ceil": ([[1.0]], {}, torch.ceil),
    "Round": ([[0.5, 1.5]], {}, torch.round),
    "Pow": ([[0.0, 0.0, 0.0, 2.0, -2.0], [0.0, 2.0, 1.0, 0.0, 0.0]], {}, torch.pow),
    "Max": ([[1.0, 2.0, -INF], [1.0, 1.0, -INF]], {}, torch.maximum),
    "Min": ([[1.0, 2.0, INF], [1.0, 1.0, INF]], {}, torch.minimum),
    "Clip": ([[-1.0, 1.0, 0.0, 2.0, -2.0], -1.0, 1.0], {}, torch.clamp),
    "Clip to nothing": ([[-2.0, 0.0, 2.0], 1.0, -1.0], {}, torch.clamp),
    "ReduceMax": ([[1.0, 3.0, 3.0]], {}, torch.amax),
    "ReduceMin": ([[1.0, 1.0, 3.0]], {}, torch.amin),
    "ReduceL1": ([[0.0, 1.0]], {}, lambda x: torch.linalg.vector_norm(x, 1)),
    "ReduceL2": ([[0.0, 0.0]], {}, torch.linalg.vector_norm),
    "ReduceLogSumExp": ([[1000.0, 1001.0, -INF]], {}, lambda x: torch.logsumexp(x, 0)),
    "SoftmaxCrossEntropyLoss": (
        [[[1.0, 2.0], [3.0, 4.0]], [7, 7]],
        {"ignore_index": 7},
        lambda x, y: F.cross_entropy(x, y, ignore_index=7),
    ),
    "NegativeLogLikelihoodLoss": (
        [[[-1.0, -2.0], [-3.0, -4.0]], [-1, -1]],
        {"ignore_index": -1},
        lambda x, y: F.nll_loss(x, y, ignore_index=-1),
    ),
}


@pytest.mark.parametrize("name", KINKS)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_kinks_and_poles_are_as_in_pytorch(name: str) -> None:
    inputs, attributes, function = KINKS[name]
    found = gradients(name.split()[0], inputs, attributes)
    tensors = [torch.tensor(np.asarray(value)) for value in inputs]
    wanted = [tensor.requires_grad_() for tensor in tensors if tensor.is_floating_point()]
    expected = torch.autograd.grad(function(*tensors).sum(), wanted)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-8, atol=0)  # Selu's constants differ


def test_log_sum_of_nothing_has_no_gradient() -> None:
    """PyTorch has NaN there: exp(-inf - -inf)."""
    (found,) = gradients("ReduceLogSumExp", [[-INF, -INF]], {})
    assert found.tolist() == [0.0, 0.0]


SMOOTH: dict[str, tuple[dict[str, Any], Callable[..., torch.Tensor]]] = {
    "Sigmoid": ({}, torch.sigmoid),
    "Tanh": ({}, torch.tanh),
    "Softplus": ({}, F.softplus),
    "Softsign": ({}, F.softsign),
    "Mish": ({}, F.mish),
    "Gelu": ({}, F.gelu),
    "Gelu tanh": ({"approximate": "tanh"}, lambda x: F.gelu(x, approximate="tanh")),
    "Elu": ({"alpha": 0.5}, lambda x: F.elu(x, 0.5)),
    "Selu": ({}, F.selu),
    "HardSwish": ({}, F.hardswish),
    "Erf": ({}, torch.erf),
    "Sin": ({}, torch.sin),
    "Cos": ({}, torch.cos),
    "Reciprocal": ({}, torch.reciprocal),
    "ReduceL2": ({"keepdims": 0}, torch.linalg.vector_norm),
    "ReduceLogSumExp": ({"keepdims": 0}, lambda x: torch.logsumexp(x, 0)),
    "ReduceSumSquare": ({"keepdims": 0}, lambda x: (x * x).sum()),
}


@pytest.mark.parametrize("name", SMOOTH)
def test_second_derivatives(name: str) -> None:
    attributes, function = SMOOTH[name]
    x, direction = np.array([-4.0, -1.3, -0.4, 0.7, 2.0]), np.array([1.0, -2.0, 0.5, 3.0, 1.5])
    model = autodiff.vjp(one_node(name.split()[0], [x], attributes), of=["y"], wrt=["x0"])
    model = autodiff.vjp(model, of=["x0.grad"], wrt=["x0"])
    check_model(model.ir)
    tensor = torch.tensor(x, requires_grad=True)
    y = function(tensor)
    (first,) = torch.autograd.grad(y.sum(), tensor, create_graph=True)
    (second,) = torch.autograd.grad((first * torch.tensor(direction)).sum(), tensor)
    feed = {"x0": x, "y.cotangent": np.ones(y.shape), "x0.grad.cotangent": direction}
    output = next(port.name for port in model.outputs if port.name.endswith(".grad.grad"))
    (found,) = evaluator(model.to_bytes()).run([output], feed)
    np.testing.assert_allclose(found, second.numpy(), rtol=1e-8, atol=1e-12)


def test_second_derivative_of_a_loss() -> None:
    rng = np.random.default_rng(0)
    x, labels, direction = rng.standard_normal((4, 3)), np.array([0, 2, 1, 2]), rng.standard_normal((4, 3))
    model = autodiff.vjp(one_node("SoftmaxCrossEntropyLoss", [x, labels], {}), of=["y"], wrt=["x0"])
    model = autodiff.vjp(model, of=["x0.grad"], wrt=["x0"])
    tensor = torch.tensor(x, requires_grad=True)
    loss = F.cross_entropy(tensor, torch.tensor(labels))
    (first,) = torch.autograd.grad(loss, tensor, create_graph=True)
    (second,) = torch.autograd.grad((first * torch.tensor(direction)).sum(), tensor)
    output = next(port.name for port in model.outputs if port.name.endswith(".grad.grad"))
    feed = {"x0": x, "x1": labels, "y.cotangent": np.array(1.0), "x0.grad.cotangent": direction}
    found, value = evaluator(model.to_bytes()).run([output, "y"], feed)
    np.testing.assert_allclose(found, second.numpy(), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(value, loss.item(), rtol=1e-12)


def test_the_loss_and_its_gradient_share_one_logarithm() -> None:
    inputs = [np.zeros((2, 3)), np.array([0, 1])]
    model = autodiff.vjp(one_node("SoftmaxCrossEntropyLoss", inputs, {}), of=["y"], wrt=["x0"])
    nodes = [node.op_type for node in onnx.load_from_string(model.to_bytes()).graph.node]
    assert nodes.count("LogSoftmax") == 1
    assert "SoftmaxCrossEntropyLoss" not in nodes
