"""Sliding windows: what a gradient does to the forward pass, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from archipel import Model
from archipel.autodiff import vjp
from archipel.errors import MissingRuleError


def model(
    op_type: str, shapes: dict[str, list[int | str]], constants: dict[str, np.ndarray] | None = None, **attributes: Any
) -> Model:
    """One node; inputs in the order of `shapes`, then those of `constants`."""
    constants = constants or {}
    inputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in shapes.items() if n]
    node = helper.make_node(op_type, [*shapes, *constants], ["y"], name="node", **attributes)
    rank = len(next(iter(shapes.values())))
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, [f"y{axis}" for axis in range(rank)])
    fixed = [numpy_helper.from_array(array, name) for name, array in constants.items() if name]
    graph = helper.make_graph([node], "case", inputs, [result], fixed)
    return Model.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10))


def run(model: Model, feed: dict[str, np.ndarray]) -> np.ndarray:
    session = onnxruntime.InferenceSession(model.to_bytes(), providers=["CPUExecutionProvider"])
    return session.run(["y"], feed)[0]


@pytest.mark.parametrize("batch", ["N", 2])
def test_depthwise_with_short_lines_gives_the_same_forward_pass(batch: str | int) -> None:
    rng = np.random.default_rng(3)
    original = model("Conv", {"x": [batch, 3, 20, 5], "w": [3, 1, 3, 2], "b": [3]}, group=3, pads=[1, 0, 1, 1])
    step = vjp(original, of=["y"], wrt=["x", "w", "b"])
    feed = {
        "x": rng.standard_normal((2, 3, 20, 5), np.float32),
        "w": rng.standard_normal((3, 1, 3, 2), np.float32),
        "b": rng.standard_normal(3, np.float32),
    }
    expected = run(original, feed)
    found = run(step, {**feed, "y.cotangent": np.ones_like(expected)})
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert not any(node.name == "node" for node in step.ir.graph)


def test_a_frozen_depthwise_weight_leaves_the_forward_pass_alone() -> None:
    original = model("Conv", {"x": ["N", 3, 20, 5], "w": [3, 1, 3, 3]}, group=3, pads=[1, 1, 1, 1])
    step = vjp(original, of=["y"], wrt=["x"])
    assert any(node.name == "node" for node in step.ir.graph)


SCALES = np.array([1, 1, 2, 2], np.float32)
REFUSED = {
    "channels must be fixed": model(
        "MaxPool", {"x": [1, "C", 5, 5]}, kernel_shape=[3, 3], strides=[1, 1], pads=[1, 1, 1, 1]
    ),
    "make them constants": model("Resize", {"x": [1, 1, 2, 2], "": [], "scales": [4]}),
    "must have a fixed size": model("Resize", {"x": [1, 1, "H", 2]}, {"": SCALES, "scales": SCALES}, mode="linear"),
    "padding depends on spatial sizes": model(
        "ConvTranspose", {"x": [1, 1, "H"], "w": [1, 1, 2]}, strides=[2], output_shape=[6]
    ),
    "kernel_shape: must be fixed": model("Conv", {"x": [1, 1, 5], "w": [1, 1, "K"]}),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_is_refused_says_why(reason: str) -> None:
    with pytest.raises(MissingRuleError, match=reason):
        vjp(REFUSED[reason], of=["y"], wrt=["x"])
