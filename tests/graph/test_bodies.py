"""Bodies of loops and branches in the form that differentiation works on."""

from __future__ import annotations

import math

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime
from onnx.reference import ReferenceEvaluator

import archipel
from archipel import Model, autodiff
from archipel.graph.bodies import remove_unneeded
from archipel.graph.body_shapes import infer_graph
from archipel.graph.shapes import dims
from archipel.graph.walk import captured_values


def test_branches_of_a_body_may_return_one_constant() -> None:
    """The `break` makes a branch that returns True and one that returns False; the loop has a True of its own."""

    def repeated(x: float, w: np.ndarray) -> float:
        h = x
        for i in range(w.shape[0]):
            h = np.tanh(h * w[i])
            if h > 3:
                break
        return h

    model = archipel.function(repeated, (np.float64(0.5), np.ones(2)))
    result = autodiff.gradient(model, of="output", wrt=["x"])
    session = onnxruntime.InferenceSession(result.to_bytes(), providers=["CPUExecutionProvider"])
    [found] = session.run(["x.grad"], {"x": np.array(0.5), "w": np.ones(2)})
    once = math.tanh(0.5)
    assert math.isclose(found, (1 - once**2) * (1 - math.tanh(once) ** 2), rel_tol=1e-12)


def test_plain_scans_compute_the_same() -> None:
    # One Scan in the other: the inner body reads the weight and the outer state, the outer one the weight through it.
    text = """<ir_version: 10, opset_import: ["": 21]>
    f (float[T, K, 2] x, float[2] start, float[2] w) => (float[2] last, float[T, K, 2] y)
    <float[2] small = {0.5, 2.0}> {
        last, y = Scan <num_scan_inputs = 1, scan_input_directions = [1], scan_output_directions = [0],
            body = outer (float[2] s, float[K, 2] row) => (float[2] t, float[K, 2] ys) {
            r, ys = Scan <num_scan_inputs = 1, scan_output_directions = [1],
                body = inner (float[2] a, float[2] item) => (float[2] b, float[2] z) {
                    p = Mul(item, w)
                    q = Mul(p, small)
                    b = Add(a, q)
                    z = Add(b, s)
                }> (s, row)
            t = Mul(r, small)
        }> (start, x)
    }"""
    model = Model.from_proto(onnx.parser.parse_model(text))
    plain = model.plain_scans()
    onnx.checker.check_model(onnx.load_from_string(plain.to_bytes()), full_check=True)
    for level in plain.ir.graph.subgraphs():
        assert captured_values(level) == []
    x, start, w = np.random.default_rng(0).standard_normal((4, 3, 2), np.float32), np.ones(2), np.array([2, 3])
    feed = {"x": x, "start": start.astype(np.float32), "w": w.astype(np.float32)}
    session = onnxruntime.InferenceSession(model.to_bytes(), providers=["CPUExecutionProvider"])
    expected = session.run(None, feed)
    # An implementation that knows neither directions nor values from outside.
    for found, other in zip(ReferenceEvaluator(plain.to_bytes()).run(None, feed), expected):
        np.testing.assert_allclose(found, other, rtol=1e-5)
    assert plain.plain_scans().to_bytes() == plain.to_bytes()


def test_a_state_may_change_its_size_because_another_one_does() -> None:
    """`late` is the other state one iteration before: that its size changes shows once the other's is known to."""
    model = ir.from_onnx_text("""<ir_version: 10, opset_import: ["" : 21]>
    f (float[2] x, int64 k) => (float[a] y, float[b] z, float[2] u) {
        y, z, u = Loop (k, , x, x, x) <
            body = step (int64 i, bool go_in, float longer, float late, float same)
                => (bool go, float longer_out, float late_out, float same_out) {
                go = Identity (go_in)  longer_out = Concat <axis = 0> (longer, longer)
                late_out = Identity (longer)  same_out = Neg (same)
            }>
    }""")
    (node,) = model.graph
    for level in model.graph.subgraphs():
        for value in (*level.inputs[2:], *level.outputs[1:]):
            value.shape = None
    for value in node.outputs:
        value.shape = None
    infer_graph(model.graph)
    assert [dims(value) for value in node.outputs] == [(None,), (None,), (2,)]


def test_what_a_removed_loop_captures_is_read_no_more() -> None:
    model = ir.from_onnx_text("""<ir_version: 10, opset_import: ["" : 21]>
    f (float[2] x, float[2] w, int64 k) => (float[2] y) {
        h = Loop (k, , x) <body = step (int64 i, bool go_in, float[2] s) => (bool go, float[2] t) {
            go = Identity (go_in)  t = Mul (s, w)
        }>
        y = Neg (x)
    }""")
    x, w, k = model.graph.inputs
    remove_unneeded(model.graph, model.graph.outputs)
    assert [node.op_type for node in model.graph] == ["Neg"]
    assert [len(value.uses()) for value in (x, w, k)] == [1, 0, 0]
