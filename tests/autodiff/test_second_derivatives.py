"""What the rules of sliding windows emit has rules, too: second derivatives against PyTorch's double backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from gradient_cases.reference import evaluator
from onnx import TensorProto, helper, numpy_helper
from torch.nn import functional as F

from archipel import Model
from archipel.autodiff import vjp

Function = Callable[..., torch.Tensor]


def convolution(function: Function, **options: Any) -> Function:
    return lambda x, w: function(x, w, **options)


CASES: dict[str, tuple[str, dict[str, Any], list[tuple[int, ...]], Function]] = {
    "shifted rows": (
        "Conv",
        {"pads": [1, 1, 1, 1]},
        [(2, 8, 6, 5), (4, 8, 3, 3)],
        convolution(F.conv2d, padding=1),
    ),
    "strided": (
        "Conv",
        {"pads": [1, 1, 1, 1], "strides": [2, 2]},
        [(2, 3, 6, 5), (4, 3, 3, 3)],
        convolution(F.conv2d, padding=1, stride=2),
    ),
    "depthwise": (
        "Conv",
        {"pads": [1, 1, 1, 1], "group": 3},
        [(2, 3, 6, 5), (3, 1, 3, 3)],
        convolution(F.conv2d, padding=1, groups=3),
    ),
    "narrow depthwise": (
        "Conv",
        {"pads": [1, 1, 1, 1], "group": 3},
        [(2, 3, 9, 3), (3, 1, 3, 3)],
        convolution(F.conv2d, padding=1, groups=3),
    ),
    "transposed": (
        "ConvTranspose",
        {"pads": [1, 1, 1, 1], "strides": [2, 2], "output_padding": [1, 1]},
        [(2, 3, 4, 3), (3, 2, 3, 3)],
        convolution(F.conv_transpose2d, padding=1, stride=2, output_padding=1),
    ),
    "average, side by side": (
        "AveragePool",
        {"kernel_shape": [2, 2], "strides": [2, 2]},
        [(2, 2, 5, 4)],
        lambda x: F.avg_pool2d(x, 2),
    ),
    "average, overlapping": (
        "AveragePool",
        {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]},
        [(2, 2, 5, 4)],
        lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
    ),
    "average, dense": (
        "AveragePool",
        {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1], "count_include_pad": 1},
        [(2, 2, 5, 4)],
        lambda x: F.avg_pool2d(x, 3, 1, 1),
    ),
    "maximum, side by side": (
        "MaxPool",
        {"kernel_shape": [2, 2], "strides": [2, 2]},
        [(2, 2, 5, 4)],
        lambda x: F.max_pool2d(x, 2),
    ),
    "maximum, overlapping": (
        "MaxPool",
        {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]},
        [(2, 2, 5, 4)],
        lambda x: F.max_pool2d(x, 3, 2, 1),
    ),
    "global": ("GlobalAveragePool", {}, [(2, 2, 5, 4)], lambda x: x.mean((2, 3), keepdim=True)),
    "nearest": (
        "Resize",
        {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"},
        [(2, 2, 3, 4)],
        lambda x: F.interpolate(x, scale_factor=2.0),
    ),
    "linear": (
        "Resize",
        {"mode": "linear"},
        [(2, 2, 3, 4)],
        lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"),
    ),
}


def model(op_type: str, attributes: dict[str, Any], shapes: list[tuple[int, ...]]) -> Model:
    """z = y * y for y the operator's output, so that its gradient depends on every input."""
    names = ["x", "w"][: len(shapes)]
    inputs = [helper.make_tensor_value_info(n, TensorProto.DOUBLE, s) for n, s in zip(names, shapes)]
    scales = [numpy_helper.from_array(np.array([1, 1, 2, 2], np.float32), "scales")]
    taken = [*names, "", "scales"] if op_type == "Resize" else names
    nodes = [
        helper.make_node(op_type, taken, ["y"], name="node", **attributes),
        helper.make_node("Mul", ["y", "y"], ["z"], name="square"),
    ]
    results = [helper.make_tensor_value_info("z", TensorProto.DOUBLE, None)]
    graph = helper.make_graph(nodes, "case", inputs, results, scales if op_type == "Resize" else [])
    return Model.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled(every=6)
def test_gradient_of_a_gradient(name: str) -> None:
    op_type, attributes, shapes, function = CASES[name]
    rng = np.random.default_rng(7)
    arrays = [rng.standard_normal(shape) for shape in shapes]
    names = ["x", "w"][: len(shapes)]
    first = vjp(model(op_type, attributes, shapes), of=["z"], wrt=names)
    second = vjp(first, of=[f"{n}.grad" for n in names], wrt=names)

    tensors = [torch.from_numpy(a).requires_grad_() for a in arrays]
    z = function(*tensors) ** 2
    g = torch.from_numpy(rng.standard_normal(z.shape))
    once = torch.autograd.grad(z, tensors, g, create_graph=True)
    seeds = [torch.from_numpy(rng.standard_normal(shape)) for shape in shapes]
    expected = torch.autograd.grad(once, tensors, seeds)

    feed = dict(zip(names, arrays)) | {"z.cotangent": g.numpy()}
    feed |= {f"{n}.grad.cotangent": seed.numpy() for n, seed in zip(names, seeds)}
    found = evaluator(second.to_bytes()).run([f"{n}.grad.grad" for n in names], feed)
    for ours, theirs in zip(found, expected):
        np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-6, atol=1e-9)
