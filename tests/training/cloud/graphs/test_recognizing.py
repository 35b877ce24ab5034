"""Gradients that `recognize_gradients` finds: against the graph as it was written, and against PyTorch's autograd."""

from __future__ import annotations

import onnx_ir as ir
import pytest
import torch
from torch.nn import functional

from archipel import Model, autodiff
from archipel.training.cloud.graphs.recognizing import recognize_gradients
from archipel.training.cloud.graphs.torch_module import TorchModule
from archipel.training.cloud.ops.gradients import DOMAIN

torch.set_num_threads(1)

# Shapes of x and of the weight, and the attributes of the Conv.
CONVOLUTIONS = {
    "plain": ((2, 3, 8, 8), (4, 3, 3, 3), {}),
    "padded": ((2, 1, 9, 9), (6, 1, 5, 5), {"pads": [2, 2, 2, 2]}),
    "many elements": ((2, 6, 9, 7), (8, 6, 5, 5), {}),
    "stride": ((3, 4, 9, 10), (6, 4, 3, 3), {"strides": [2, 3], "pads": [1, 1, 1, 1]}),
    "dilation": ((2, 3, 12, 11), (4, 3, 3, 3), {"dilations": [2, 3]}),
    "uneven padding": ((2, 2, 7, 7), (4, 2, 3, 3), {"pads": [0, 1, 2, 0]}),
    "same": ((2, 2, 8, 7), (4, 2, 3, 3), {"auto_pad": "SAME_UPPER", "strides": [2, 2]}),
    "groups": ((2, 4, 8, 8), (6, 2, 3, 3), {"group": 2}),
    "depthwise": ((2, 4, 12, 12), (4, 1, 3, 3), {"group": 4, "pads": [1, 1, 1, 1]}),
    "one element": ((2, 4, 5, 5), (3, 4, 1, 1), {}),
    "sequence": ((2, 3, 16), (5, 3, 4), {"strides": [2]}),
    "volume": ((2, 2, 6, 5, 6), (3, 2, 3, 2, 3), {"pads": [1, 0, 1, 1, 0, 1]}),
}

# The shape of x, and the attributes of the MaxPool.
POOLS = {
    "tiles": ((2, 3, 8, 8), {"kernel_shape": [2, 2], "strides": [2, 2]}),
    "tiles and a rest": ((2, 3, 9, 7), {"kernel_shape": [2, 3], "strides": [2, 3]}),
    "overlapping": ((2, 3, 9, 9), {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}),
    "uneven padding": ((2, 3, 9, 9), {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [0, 1, 1, 0]}),
    "dilation": ((2, 2, 11, 9), {"kernel_shape": [2, 3], "strides": [2, 1], "dilations": [3, 2]}),
    "rounded up": ((2, 2, 8, 9), {"kernel_shape": [3, 3], "strides": [2, 2], "ceil_mode": 1}),
    "sequence": ((2, 3, 12), {"kernel_shape": [3], "strides": [2]}),
}


def one_node(op_type: str, shapes: dict[str, tuple[int, ...]], attributes: dict[str, object], dtype: str) -> Model:
    """A model of the node, with a batch of any size."""
    kind = ir.DataType[dtype]
    inputs = [
        ir.Value(name=name, type=ir.TensorType(kind), shape=ir.Shape(["batch", *shape[1:]] if name == "x" else shape))
        for name, shape in shapes.items()
    ]
    node = ir.node(op_type, inputs, attributes)
    node.outputs[0].name, node.outputs[0].type = "y", ir.TensorType(kind)
    graph = ir.Graph(inputs, node.outputs, nodes=[node], opset_imports={"": 21}, name="one")
    rank = len(shapes["x"])
    graph.outputs[0].shape = ir.Shape([None] * rank)
    return Model.from_proto(ir.to_proto(ir.Model(graph, ir_version=10)))


def run(model: Model, given: dict[str, torch.Tensor], output: str) -> torch.Tensor:
    module = TorchModule(model)
    found = module(*(given[name] for name in module.input_names))
    return found[[info.name for info in model.outputs].index(output)] if isinstance(found, tuple) else found


def names(model: Model) -> list[str]:
    return [node.op_type for node in model.ir.graph if node.domain == DOMAIN]


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_the_gradient_of_a_convolution_in_its_weight(name: str) -> None:
    shape, weight, attributes = CONVOLUTIONS[name]
    written = autodiff.vjp(one_node("Conv", {"x": shape, "w": weight}, attributes, "DOUBLE"), of=["y"], wrt=["w"])
    found = recognize_gradients(written)
    assert names(found) == ["ConvWeight"]
    assert names(written) == []
    torch.manual_seed(0)
    x, w = torch.randn(shape, dtype=torch.float64), torch.randn(weight, dtype=torch.float64, requires_grad=True)
    begins, ends = _padding(shape, weight, attributes)
    pairs = [number for pair in zip(reversed(begins), reversed(ends)) for number in pair]
    convolve = (functional.conv1d, functional.conv2d, functional.conv3d)[len(begins) - 1]
    y = convolve(
        functional.pad(x, pairs), w, None, attributes.get("strides", 1), 0, attributes.get("dilations", 1),
        attributes.get("group", 1),
    )  # fmt: skip
    g = torch.randn_like(y)
    (expected,) = torch.autograd.grad(y, w, g)
    result = run(found, {"x": x, "w": w.detach(), "y.cotangent": g}, "w.grad")
    torch.testing.assert_close(result, expected, rtol=1e-10, atol=1e-10)


def _padding(shape: tuple[int, ...], weight: tuple[int, ...], attributes: dict[str, object]) -> tuple[list, list]:
    spatial = len(shape) - 2
    if "auto_pad" not in attributes:
        pads = attributes.get("pads", [0] * 2 * spatial)
        return pads[:spatial], pads[spatial:]
    totals = [max((-(-n // s) - 1) * s + k - n, 0) for n, k, s in zip(shape[2:], weight[2:], attributes["strides"])]
    return [t // 2 for t in totals], [t - t // 2 for t in totals]


@pytest.mark.parametrize("name", POOLS)
def test_the_gradient_of_a_maximum_is_shared_among_equal_ones(name: str) -> None:
    shape, attributes = POOLS[name]
    written = autodiff.vjp(one_node("MaxPool", {"x": shape}, attributes, "DOUBLE"), of=["y"], wrt=["x"])
    found = recognize_gradients(written)
    assert names(found) == ["MaxPool"]
    # Few numbers, so that windows have several maxima; negative ones, which padding must not beat.
    torch.manual_seed(0)
    x = torch.randint(-3, 0, shape).double()
    y = run(one_node("MaxPool", {"x": shape}, attributes, "DOUBLE"), {"x": x}, "y")
    given = {"x": x, "y.cotangent": torch.randn_like(y)}
    expected = run(written, given, "x.grad")
    torch.testing.assert_close(run(found, given, "x.grad"), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(expected.sum(), given["y.cotangent"].sum())


@pytest.mark.sampled(every=3)
def test_a_rectifier_and_all_of_a_network() -> None:
    network = torch.nn.Sequential(
        torch.nn.Conv2d(1, 3, 3), torch.nn.ReLU(), torch.nn.MaxPool2d(2), torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(),
        torch.nn.Flatten(), torch.nn.Linear(100, 2),
    )  # fmt: skip
    x = torch.randn(2, 1, 16, 16)
    model = Model.from_torch(network, x)
    wanted = [name for name in model.parameter_names if "weight" in name]
    found = recognize_gradients(autodiff.vjp(model, of=["output"], wrt=wanted))
    assert sorted(names(found)) == ["ConvWeight", "ConvWeight", "MaxPool", "Relu", "Relu"]
    g = torch.randn(2, 2)
    expected = torch.autograd.grad(network(x), [network.get_parameter(name) for name in wanted], g)
    for name, gradient in zip(wanted, expected, strict=True):
        result = run(found, {"input": x, "output.cotangent": g}, f"{name}.grad")
        torch.testing.assert_close(result, gradient, rtol=1e-5, atol=1e-5)


def test_a_gradient_by_another_rule_stays_as_it_is() -> None:
    """Of the caller's own rule nothing is recognised, nor of a part that computes something else."""
    model = one_node("Conv", {"x": (2, 3, 8, 8), "w": (4, 3, 3, 3)}, {}, "FLOAT")

    def twice(ctx: autodiff.RuleContext) -> autodiff.Gradients:
        return [None, ctx.op.Mul(ctx.input(1), 2.0)]

    own = autodiff.vjp(model, of=["y"], wrt=["w"], rules={("", "Conv"): twice})
    assert recognize_gradients(own) is own
    # One row of the kernel is read at another shift.
    model = one_node("Conv", {"x": (2, 6, 9, 9), "w": (8, 6, 5, 5)}, {}, "FLOAT")
    written = autodiff.vjp(model, of=["y"], wrt=["w"])
    moved = next(node for node in written.ir.graph if node.op_type == "Slice")
    start = moved.inputs[1]
    assert start is not None
    assert start.const_value is not None
    other = ir.Value(name="other", const_value=ir.tensor(start.const_value.numpy() - 1, name="other"))
    written.ir.graph.register_initializer(other)
    moved.replace_input_with(1, other)
    assert recognize_gradients(written) is written
