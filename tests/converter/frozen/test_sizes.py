"""Shape arithmetic against ONNX Runtime: the same numbers for every batch size, without the values it was read from."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from archipel.converter.frozen.sizes import fold_sizes
from archipel.graph.build import Builder
from archipel.graph.passes import remove_dead_code
from archipel.graph.shapes import constant_array

# (how `s` is made of r, float[batch, 3, 4], is it fixed)
CASES = [
    ("s = Shape(r)", False),
    ("s = Shape<start = 1>(r)", True),
    ("s = Shape<start = -3, end = -1>(r)", False),
    ("n = Shape(r) a = Constant<value_ints = [-2]>() b = Constant<value_ints = [9223372036854775807]>() "
     "s = Slice(n, a, b)", True),
    ("n = Shape(r) i = Constant<value = int64 {0}>() e = Gather(n, i) m = Constant<value_ints = [-1]>() "
     "a = Reshape(e, m) c = Constant<value_ints = [12]>() s = Concat<axis = 0>(a, c)", False),
    ("n = Shape(r) i = Constant<value_ints = [2, -2]>() s = Gather(n, i)", True),
    ("n = Shape<start = 0, end = 1>(r) z = Constant<value_ints = [0]>() e = Squeeze(n, z) s = Unsqueeze(e, z)", False),
    ("a = Shape<start = 1, end = 2>(r) b = Shape<start = 2>(r) p = Mul(a, b) f = Shape<start = 0, end = 1>(r) "
     "q = Add(p, a) t = Sub(q, b) s = Concat<axis = 0>(f, p, t)", False),
    ("n = Shape(r) f = Cast<to = 7>(n) s = Identity(f)", False),
    # Sizes of no axes at all, added to each other.
    ("n = Shape(r) e = Shape<start = 1, end = 1>(r) d = Shape<start = 2, end = 2>(r) m = Add(e, d) "
     "s = Concat<axis = 0>(n, m)", False),
]  # fmt: skip


@pytest.mark.parametrize(("body", "fixed"), CASES, ids=range(len(CASES)))
def test_numbers_stay_and_the_value_is_not_needed(body: str, fixed: bool) -> None:
    proto = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]> agraph (float[batch, 3, 4] x) => (int64[n] y) '
        f"{{ r = Relu(x) {body} o = Constant<value_ints = [1]>() y = Mul(s, o) }}"
    )
    before = ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    model = ir.serde.deserialize_model(onnx.shape_inference.infer_shapes(proto, data_prop=True))
    last = model.graph[-1]
    # The last product stands for what reads the numbers in the rest of a program.
    frozen = {model.graph.inputs[0], *(v for node in model.graph if node is not last for v in node.outputs)}
    sizes = fold_sizes(Builder(model.graph), model.graph.inputs[0], frozen)
    remove_dead_code(model)
    assert "Relu" not in {node.op_type for node in model.graph}
    assert (constant_array(last.inputs[0]) is not None) == fixed
    assert (last.inputs[0] in sizes) == (not fixed)
    after = ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    for batch in (1, 2, 5):
        x = np.zeros((batch, 3, 4), np.float32)
        np.testing.assert_array_equal(after.run(None, {"x": x})[0], before.run(None, {"x": x})[0])


def test_products_with_the_batch_stay() -> None:
    """They would need an operator for each: whoever reads them reads the value."""
    proto = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]> agraph (float[batch, 3] x) => (int64[n] y) '
        "{ r = Relu(x) a = Shape<start = 0, end = 1>(r) b = Shape<start = 1>(r) y = Mul(a, b) }"
    )
    model = ir.serde.deserialize_model(onnx.shape_inference.infer_shapes(proto))
    frozen = {model.graph.inputs[0], *(v for node in model.graph for v in node.outputs)}
    sizes = fold_sizes(Builder(model.graph), model.graph.inputs[0], frozen)
    assert model.graph.outputs[0] not in sizes
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    assert session.run(None, {"x": np.zeros((4, 3), np.float32)})[0].tolist() == [12]
