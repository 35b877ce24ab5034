"""Scan as the builder writes it, against the same loop in NumPy."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest

from archipel import Model
from archipel.errors import GraphError
from archipel.graph import Builder, check_model
from archipel.graph.control import scan
from archipel.graph.passes import remove_dead_code, share_subexpressions
from archipel.graph.shapes import dims

SEQUENCE = """<ir_version: 10, opset_import: ["" : 21]>
agraph (float[t, n, 3] x, float[n, 3] h, float[3] w) => (float[t, n, 3] y) { y = Identity (x) }"""


@pytest.mark.parametrize("reverse", [False, True])
def test_scan_carries_and_emits(reverse: bool) -> None:
    model = Model.from_proto(onnx.parser.parse_model(SEQUENCE))
    x, h, w = model.ir.graph.inputs
    op = Builder(model.ir.graph)

    def body(inner: Builder, carried: list, items: list) -> tuple[list, list]:
        state = inner.Tanh(inner.Add(inner.Mul(carried[0], 0.5), inner.Mul(items[0], w)))
        return [state], [state, inner.Mul(state, 2.0)]

    (last,), (states, doubled) = scan(op, body, [h], [x], reverse=reverse)
    assert (dims(last), dims(states), dims(doubled)) == (("n", 3), ("t", "n", 3), ("t", "n", 3))
    for value, name in ((last, "last"), (states, "states"), (doubled, "doubled")):
        op.name_output(value, name)
    share_subexpressions(model.ir)
    remove_dead_code(model.ir)
    check_model(model.ir)

    rng = np.random.default_rng(0)
    feed = {name: rng.standard_normal(shape, np.float32) for name, shape in (("x", (4, 2, 3)), ("h", (2, 3)), ("w", 3))}
    expected, state = np.zeros((4, 2, 3), np.float32), feed["h"]
    for i in reversed(range(4)) if reverse else range(4):
        state = expected[i] = np.tanh(state * 0.5 + feed["x"][i] * feed["w"])
    session = onnxruntime.InferenceSession(model.copy().to_bytes(), providers=["CPUExecutionProvider"])
    found = session.run(["last", "states", "doubled"], feed)
    for ours, theirs in zip(found, (state, expected, expected * 2)):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_scan_that_changes_what_it_carries() -> None:
    model = Model.from_proto(onnx.parser.parse_model(SEQUENCE))
    x, h, _ = model.ir.graph.inputs
    with pytest.raises(GraphError, match=r"carried .* is FLOAT\['n', 3\], the body returns FLOAT\[3\]"):
        scan(Builder(model.ir.graph), lambda op, s, i: ([op.ReduceSum(s[0], [0], keepdims=0)], []), [h], [x])
    with pytest.raises(GraphError, match="1 values are carried, the body returns 0"):
        scan(Builder(model.ir.graph), lambda op, s, i: ([], []), [h], [x])
