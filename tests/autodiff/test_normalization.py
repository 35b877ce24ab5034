"""What the contract of one node does not show: second derivatives, and runs that must not change one another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from gradient_cases.reference import evaluator
from onnx import helper, numpy_helper
from torch.nn import functional as F

from archipel import Model
from archipel.autodiff import gradient, vjp

RNG = np.random.default_rng(5)
SHAPE = (4, 6, 5)
CASES: dict[str, tuple[dict[str, Any], int, Callable[..., torch.Tensor]]] = {
    "BatchNormalization": ({"training_mode": 1}, 6, lambda x, s, b: F.batch_norm(x, None, None, s, b, True)),
    "InstanceNormalization": ({}, 6, lambda x, s, b: F.instance_norm(x, None, None, s, b)),
    "GroupNormalization": ({"num_groups": 2}, 6, lambda x, s, b: F.group_norm(x, 2, s, b)),
    "LayerNormalization": ({}, 5, lambda x, s, b: F.layer_norm(x, (5,), s, b)),
}


def sum_of_tanh(op_type: str, attributes: dict[str, Any], constants: dict[str, np.ndarray]) -> onnx.ModelProto:
    """x [batch, 6, 5], double -> s = sum(tanh(normalized)), with two nodes of the operator one after the other."""
    running = ["mean", "var"] if op_type == "BatchNormalization" else []
    unread = [["u", "v"], ["w", "z"]] if running else [[], []]
    affine = ["scale", "bias", *running]
    nodes = [
        helper.make_node(op_type, ["x", *affine], ["first", *unread[0]], name="first", **attributes),
        helper.make_node(op_type, ["first", *affine], ["y", *unread[1]], name="second", **attributes),
        helper.make_node("Tanh", ["y"], ["t"]),
        helper.make_node("ReduceSum", ["t"], ["s"], keepdims=0),
    ]
    double, shape = onnx.TensorProto.DOUBLE, ["batch", *SHAPE[1:]]
    graph = helper.make_graph(
        nodes,
        "two",
        [helper.make_tensor_value_info("x", double, shape)],
        [helper.make_tensor_value_info("s", double, [])],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
        value_info=[helper.make_tensor_value_info(name, double, shape) for name in ("first", "y")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


@pytest.mark.parametrize("op_type", CASES)
@pytest.mark.sampled(every=6)
def test_second_derivatives(op_type: str) -> None:
    attributes, channels, function = CASES[op_type]
    constants = {"scale": RNG.standard_normal(channels), "bias": RNG.standard_normal(channels)}
    if op_type == "BatchNormalization":
        constants |= {"mean": np.zeros(channels), "var": np.ones(channels)}
    names = ["x", "scale"]
    first = gradient(Model.from_proto(sum_of_tanh(op_type, attributes, constants)), of="s", wrt=names)
    second = vjp(first, of=["x.grad", "scale.grad"], wrt=names)
    x, scale, bias = (
        torch.tensor(value, requires_grad=True)
        for value in (RNG.standard_normal(SHAPE), constants["scale"], constants["bias"])
    )
    found = torch.autograd.grad(
        function(function(x, scale, bias), scale, bias).tanh().sum(), [x, scale], create_graph=True
    )
    cotangents = [torch.tensor(RNG.standard_normal(value.shape)) for value in (x, scale)]
    expected = torch.autograd.grad(found, [x, scale], cotangents)
    feed = {"x": x.detach().numpy()}
    feed.update({f"{name}.grad.cotangent": value.numpy() for name, value in zip(names, cotangents)})
    outputs = [value.name for value in second.outputs][-2:]
    for ours, theirs in zip(evaluator(second.to_bytes()).run(outputs, feed), expected):
        np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-6, atol=1e-8)


def test_batch_statistics_do_not_leak_between_nodes_or_runs() -> None:
    # ONNX Runtime writes the running statistics over the values that they come from, constants included.
    constants = {"scale": np.ones(6), "bias": np.zeros(6), "mean": np.zeros(6), "var": np.ones(6)}
    attributes, _, function = CASES["BatchNormalization"]
    model = gradient(Model.from_proto(sum_of_tanh("BatchNormalization", attributes, constants)), of="s", wrt=["x"])
    session = onnxruntime.InferenceSession(model.to_bytes(), providers=["CPUExecutionProvider"])
    one, zero = torch.ones(6, dtype=torch.float64), torch.zeros(6, dtype=torch.float64)
    for size in (4, 3, 4):
        x = torch.tensor(RNG.standard_normal((size, *SHAPE[1:])) + 2, requires_grad=True)
        expected = torch.autograd.grad(function(function(x, one, zero), one, zero).tanh().sum(), [x])
        np.testing.assert_allclose(
            session.run(["x.grad"], {"x": x.detach().numpy()})[0], expected[0].numpy(), rtol=1e-6, atol=1e-9
        )
