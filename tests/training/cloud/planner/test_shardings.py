"""Each strategy of an operator: what two devices compute of their parts is, put together, what one computes.

`onnx.reference` computes the operator on the parts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from archipel import Model
from archipel.training.cloud.planner.costs import Operand, Tensor, costs
from archipel.training.cloud.planner.shardings import SUM, WHOLE, Layout, leading_axes, strategies

N = 2
# operator: (shapes of inputs; shapes of parameters; constants; attributes; strategies that must be among those found)
CASES: dict[str, tuple[list[tuple[int, ...]], list[tuple[int, ...]], list[Any], dict[str, Any], set[str]]] = {
    "Gemm": ([(4, 6)], [(6, 8), (8,)], [], {}, {"batch", "column", "row"}),
    "Gemm turned": ([(4, 6)], [(8, 6), (8,)], [], {"transB": 1}, {"batch", "column", "row"}),
    "MatMul": ([(4, 5, 6)], [(6, 8)], [], {}, {"batch", "column", "row"}),
    "MatMul of two": ([(4, 2, 5, 6), (4, 2, 6, 5)], [], [], {}, {"batch", "axis 1"}),
    "Conv": ([(4, 4, 5, 5)], [(6, 4, 3, 3), (6,)], [], {}, {"batch", "column", "row"}),
    "Conv of each channel": ([(4, 4, 5, 5)], [(4, 1, 3, 3), (4,)], [], {"group": 4}, {"batch", "axis 1"}),
    "Relu": ([(4, 6)], [], [], {}, {"batch", "axis 1"}),
    "Add": ([(4, 2, 6)], [(2, 1)], [], {}, {"batch", "axis 1", "axis 2"}),
    "Mul": ([(4, 3, 6)], [], [np.ones((4, 1, 1), np.float32)], {}, {"axis 2"}),
    "Softmax": ([(4, 6)], [], [], {}, {"batch"}),
    "LayerNormalization": ([(4, 2, 6)], [(6,), (6,)], [], {}, {"batch", "axis 1"}),
    "ReduceMean": ([(4, 3, 6)], [], [np.array([1])], {"keepdims": 0}, {"batch", "axis 1"}),
    "Transpose": ([(4, 3, 6)], [], [], {"perm": [2, 0, 1]}, {"batch", "axis 1"}),
    "Reshape": ([(4, 6, 5)], [], [np.array([4, 2, 3, 5])], {}, {"batch", "axis 1"}),
    "MaxPool": ([(4, 6, 4, 4)], [], [], {"kernel_shape": [2, 2]}, {"batch", "axis 1"}),
    "Gather of rows": ([], [(7, 6)], [], {}, {"batch", "column"}),
    "Gather": ([(4, 3, 6)], [], [np.array(1)], {"axis": 1}, {"batch", "axis 1"}),
    "Concat": ([(4, 3, 6), (4, 2, 6)], [], [], {"axis": 1}, {"batch", "axis 2"}),
}


def make(case: str) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """A graph of one operator, and all that it reads."""
    shapes, learned, constants, attributes, _ = CASES[case]
    drawn = np.random.default_rng(0)
    arrays = {f"x{i}": drawn.normal(size=shape).astype(np.float32) for i, shape in enumerate(shapes)}
    weights = {f"w{i}": drawn.normal(size=shape).astype(np.float32) for i, shape in enumerate(learned)}
    fixed = {f"c{i}": array for i, array in enumerate(constants)}
    names = [*arrays, *weights, *fixed]
    if case == "Gather of rows":
        arrays, names = {"ids": drawn.integers(0, 7, (4, 2))}, ["w0", "ids"]
    node = helper.make_node(case.split()[0], names, ["y"], name="node", **attributes)
    kinds = {name: helper.np_dtype_to_tensor_dtype(array.dtype) for name, array in arrays.items()}
    graph = helper.make_graph(
        [node],
        "one",
        [helper.make_tensor_value_info(name, kinds[name], array.shape) for name, array in arrays.items()],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(array, name) for name, array in {**weights, **fixed}.items()],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    return onnx.shape_inference.infer_shapes(proto), {**arrays, **weights, **fixed}


def part(array: np.ndarray, layout: Layout, device: int) -> np.ndarray:
    return array if layout == WHOLE else np.split(array, N, layout)[device]


@pytest.mark.parametrize("case", CASES)
def test_parts_make_the_whole(case: str) -> None:
    proto, arrays = make(case)
    (unit,) = costs(Model.from_proto(proto, parameters=[name for name in arrays if name[0] == "w"]), 4).units
    (expected,) = ReferenceEvaluator(proto).run(None, {name: arrays[name] for name in arrays if name[0] in "xi"})
    found = strategies(unit, N)
    assert found[0].name == "replicate"
    assert CASES[case][4] <= {strategy.name for strategy in found[1:]}
    for strategy in found[1:]:
        results = []
        for device in range(N):
            local = dict(arrays)
            for read, layout in zip(unit.reads, strategy.reads):
                if read is None:
                    continue
                name = read.parameter.name if isinstance(read, Operand) else read.name
                local[name] = part(arrays[name], layout, device)
                if isinstance(read, Operand) and layout == WHOLE and strategy.writes[0] == SUM:
                    local[name] = arrays[name] / N  # each device adds a part of the bias
            if case == "Reshape":
                local["c0"] = arrays["c0"].copy()
                local["c0"][strategy.writes[0]] //= N
            # Of channels in groups each device has its share of the groups.
            group = 2 if (case, strategy.name) == ("Conv of each channel", "axis 1") else None
            results.append(run(proto, local, group))
        whole = sum(results) if strategy.writes[0] == SUM else np.concatenate(results, strategy.writes[0])
        np.testing.assert_allclose(whole, expected, rtol=1e-4, atol=1e-5, err_msg=strategy.name)
        assert strategy.share == 1 / N
        gradients_are_those_of_the_parts(unit.reads, strategy.reads, strategy.gradients, strategy.writes[0])


def run(proto: onnx.ModelProto, local: dict[str, np.ndarray], group: int | None) -> np.ndarray:
    """The operator on the parts, all of them as inputs."""
    node = onnx.NodeProto.FromString(proto.graph.node[0].SerializeToString())
    for attribute in node.attribute:
        if attribute.name == "group" and group is not None:
            attribute.i = group
    values = {name: helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
              for name, a in local.items()}  # fmt: skip
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph([node], "part", list(values.values()), [output])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    (result,) = ReferenceEvaluator(model).run(None, local)
    return np.asarray(result)


def gradients_are_those_of_the_parts(reads: Any, layouts: Any, gradients: Any, written: Layout) -> None:
    """A divided value's gradient is divided alike; a whole one's is a summand on each device, but for a bias that they
    add up with the summands of the result: the gradient of the sum, whole on each, is its own."""
    for read, layout, gradient in zip(reads, layouts, gradients):
        if isinstance(read, Tensor | Operand):
            assert gradient == (layout if layout >= 0 else WHOLE if written == SUM else SUM)


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ((6, 32, 16), (6, 64, 8), [(0, 0), (1, 1)]),
        ((4, 2, 3), (4, 6), [(0, 0), (1, 1)]),
        ((4, 6), (1, 4, 6), [(0, 1), (1, 2)]),
        ((12,), (3, 4), [(0, 0)]),
        ((2, 3), (3, 2), [(0, 0)]),
    ],
)
def test_axes_that_a_reshape_keeps(
    before: tuple[int, ...], after: tuple[int, ...], expected: list[tuple[int, int]]
) -> None:
    assert leading_axes(before, after) == expected
