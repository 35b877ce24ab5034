"""vmap through If, Loop and Scan, against ONNX Runtime on one lane after the other."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest

import archipel
from archipel import Model
from archipel.autodiff import gradient, vjp, vmap
from archipel.errors import AutodiffError
from archipel.graph import check_model

RNG = np.random.default_rng(0)
X = RNG.standard_normal((4, 3)).astype(np.float32)
FLAGS = np.array([True, False, False, True])
ROWS = RNG.standard_normal((4, 5, 3)).astype(np.float32)

IF = """agraph (float[3] x, bool c) => (float[3] y, float[3] z, bool[1] b) {
    y, z, b = If (c) <
        then_branch = then () => (float[3] t, float[3] k, bool[1] bt) {
            two = Constant <value = float {2}> ()
            t = Mul (x, two)
            k = Constant <value = float[3] {1, 2, 3}> ()
            bt = Constant <value = bool[1] {1}> ()
        },
        else_branch = otherwise () => (float[3] e, float[3] l, bool[1] be) {
            e = Neg (x)
            l = Constant <value = float[3] {4, 5, 6}> ()
            be = Constant <value = bool[1] {0}> ()
        }>
}"""

# Squares until the largest element is above 100, or n times; y counts up, w does not depend on the state.
LOOP = """agraph (float[3] x, int64 n, bool start) => (float[3] y, int64 count, float[3] last)
    <float hundred = {100}, float[3] zeros = {0, 0, 0}, int64 none = {0}> {
    y, count, last = Loop (n, start, x, none, zeros) <
        body = step (int64 i, bool go, float[3] s, int64 k, float[3] seen) => (
            bool more, float[3] following, int64 next, float[3] now) {
            one = Constant <value = int64 {1}> ()
            scaled = Mul (s, s)
            following = Add (scaled, x)
            top = ReduceMax <keepdims = 0> (following)
            more = Less (top, hundred)
            next = Add (k, one)
            f = Cast <to = 1> (i)
            now = Add (x, f)
        }>
}"""

# A fixed number of iterations with a stacked result; the state starts the same in all lanes.
STACKED = """agraph (float[3] x, float[3] w, int64 n) => (float[3] y, float[n_out, 3] all)
    <float[3] zeros = {0, 0, 0}, bool go = {1}> {
    y, all = Loop (n, go, zeros) <
        body = step (int64 i, bool go_in, float[3] s) => (bool go_out, float[3] following, float[3] each) {
            go_out = Identity (go_in)
            f = Cast <to = 1> (i)
            half = Mul (s, w)
            moved = Add (half, x)
            following = Add (moved, f)
            each = Sin (following)
        }>
}"""

SCAN = """agraph (float[3] start, float[5, 3] rows, float[3] w) => (float[3] y, float[3, 5] out, float[5] plain) {
    y, out, plain = Scan <num_scan_inputs = 1, scan_input_axes = [0], scan_input_directions = [1],
        scan_output_axes = [1, 0], scan_output_directions = [0, 1],
        body = step (float[3] s, float[3] row) => (float[3] following, float[3] each, float one) {
            p = Mul (s, w)
            following = Add (p, row)
            each = Tanh (following)
            one = Constant <value = float {1}> ()
        }> (start, rows)
}"""

COLUMNS = SCAN.replace("scan_input_axes = [0]", "scan_input_axes = [-1]").replace(
    "float[5, 3] rows", "float[3, 5] rows"
)

# An If with a condition of its own in a Scan in a Loop.
NESTED = """agraph (float[3] x, float[5, 3] rows) => (float[3] y) <int64 n = {2}, bool go = {1}, float zero = {0}> {
    y = Loop (n, go, x) <
        body = step (int64 i, bool go_in, float[3] s) => (bool go_out, float[3] following) {
            go_out = Identity (go_in)
            following = Scan <num_scan_inputs = 1, body = inner (float[3] t, float[3] row) => (float[3] u) {
                total = ReduceSum <keepdims = 0> (t)
                high = Greater (total, zero)
                u = If (high) <
                    then_branch = a () => (float[3] v) { v = Sub (t, row) },
                    else_branch = b () => (float[3] v2) { q = Add (t, row)  v2 = Add (q, x) }>
            }> (s, rows)
        }>
}"""

CASES = {
    "if": (IF, {"x": X, "c": np.array(True)}, ["x"]),
    "if with a condition for each lane": (IF, {"x": X, "c": FLAGS}, ["x", "c"]),
    "if, only the condition": (IF, {"x": X[0], "c": FLAGS}, ["c"]),
    "loop until": (LOOP, {"x": X * 3, "n": np.array(9), "start": np.array(True)}, ["x"]),
    "loop with counts": (LOOP, {"x": X, "n": np.array([0, 1, 5, 3]), "start": np.array(True)}, ["x", "n"]),
    "loop with starts": (LOOP, {"x": X, "n": np.array(3), "start": FLAGS}, ["x", "start"]),
    "stacked": (STACKED, {"x": X, "w": X[0], "n": np.array(4)}, ["x"]),
    "stacked, no iteration": (STACKED, {"x": X, "w": X[0], "n": np.array(0)}, ["x"]),
    "stacked, captured": (STACKED, {"x": X[0], "w": X, "n": np.array(4)}, ["w"]),
    "scan over rows": (SCAN, {"start": X[0], "rows": ROWS, "w": X[1]}, ["rows"]),
    "scan over columns": (COLUMNS, {"start": X[0], "rows": ROWS.transpose(0, 2, 1), "w": X[1]}, ["rows"]),
    "scan, captured": (SCAN, {"start": X[0], "rows": ROWS[0], "w": X}, ["w"]),
    "scan from states": (SCAN, {"start": X, "rows": ROWS[0], "w": X[1]}, ["start"]),
    "nested": (NESTED, {"x": X, "rows": ROWS[0]}, ["x"]),
    "nested, rows": (NESTED, {"x": X[0], "rows": ROWS}, ["rows"]),
}


def parse(text: str) -> Model:
    return Model.from_proto(onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]>\n{text}'))


def run(model: Model, inputs: dict) -> list[np.ndarray]:
    session = onnxruntime.InferenceSession(model.to_bytes(), providers=["CPUExecutionProvider"])
    found: list[np.ndarray] = session.run(None, inputs)
    return found


@pytest.mark.parametrize("size", [None, 4])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.sampled(every=6)
def test_lanes_of_control_flow(case: str, size: int | None) -> None:
    text, inputs, over = CASES[case]
    model = parse(text)
    mapped = vmap(model, over=over, size=size)
    check_model(mapped.ir)
    together = run(mapped, inputs)
    for i in range(4):
        alone = run(model, {n: np.asarray(v[i]) if n in over else v for n, v in inputs.items()})
        for port, ours, theirs in zip(mapped.outputs, together, alone):
            lane = ours if len(port.shape) == theirs.ndim else ours[i]
            assert lane.dtype == theirs.dtype
            np.testing.assert_allclose(lane, theirs, rtol=1e-5, atol=1e-6)


def test_nothing_runs_lane_by_lane() -> None:
    """Control flow has rules: no case adds a Scan over the lanes."""
    for text, _, over in CASES.values():
        model = parse(text)
        before = [node.op_type for node in model.ir.graph.all_nodes() if node.op_type == "Scan"]
        after = [node.op_type for node in vmap(model, over=over).ir.graph.all_nodes() if node.op_type == "Scan"]
        assert len(after) <= len(before)


def test_what_the_lanes_do_not_reach_has_none() -> None:
    mapped = vmap(parse(SCAN), over=["w"])
    assert [len(port.shape) for port in mapped.outputs] == [2, 3, 1]


def test_a_gradient_keeps_what_one_branch_computes_while_lanes_take_both() -> None:
    text = """agraph (float[n, 3] x, bool c) => (float loss)
        <float[3, 3] w = {0.7, -1, 0.4, 1, 1, -0.3, 0.2, 0.5, -1}> {
        y = If (c) <
            then_branch = then () => (float[n, 3] t) { p = MatMul (x, w)  t = Tanh (p) },
            else_branch = otherwise () => (float[n, 3] e) { q = Mul (x, x)  e = Mul (q, x) }>
        loss = ReduceSum <keepdims = 0> (y)
    }"""
    model = gradient(parse(text), wrt=["x", "w"])
    inputs = {"x": ROWS, "c": FLAGS}
    together = run(vmap(model, over=["x", "c"]), inputs)
    for i in range(4):
        for ours, theirs in zip(together, run(model, {n: np.asarray(v[i]) for n, v in inputs.items()})):
            np.testing.assert_allclose(ours[i], theirs, rtol=1e-5, atol=1e-6)


def test_empty_tensors_in_loops() -> None:
    """ONNX Runtime's Scan divides by zero where it reads or stacks an empty tensor along any axis but the first."""
    text = """agraph (float[n, 3] x, float[3, 3] w) => (float loss) <int64 k = {3}, bool go = {1}> {
        y = Loop (k, go, x) <body = step (int64 i, bool go_in, float[n, 3] s) => (bool go_out, float[n, 3] following) {
            go_out = Identity (go_in)  p = MatMul (s, w)  following = Tanh (p)
        }>
        loss = ReduceSum <keepdims = 0> (y)
    }"""
    mapped = vmap(gradient(parse(text), wrt=["x", "w"]), over=["x"])
    for lanes, batch in ((2, 0), (0, 2)):
        _, x, w = run(mapped, {"x": np.zeros((lanes, batch, 3), np.float32), "w": np.eye(3, dtype=np.float32)})
        assert x.shape == (lanes, batch, 3)
        assert w.shape == (lanes, 3, 3)


def test_stacked_results_of_uneven_loops_are_refused() -> None:
    with pytest.raises(AutodiffError, match=r"Loop '.*': its lanes stop at different times, .* another length in each"):
        vmap(parse(STACKED), over=["n"])


def test_the_gradient_of_a_vmap_where_the_vmap_of_a_gradient_is_refused() -> None:
    """A gradient stacks the states of its loop. The refusal names the other order, which works."""
    model = archipel.function(double_until_large, (np.float64(3.0),))
    with pytest.raises(AutodiffError, match="take the gradient of the vmap, not the vmap of the gradient"):
        vmap(gradient(model, of="output", wrt=["x"]), over=["x"])
    pulled = vjp(vmap(model, over=["x"]), of=["output"], wrt=["x"])
    x = np.array([3.0, 30.0, 300.0])
    result, slope = run(pulled, {"x": x, "output.cotangent": np.ones(3)})
    np.testing.assert_allclose(result, [192, 120, 300])
    np.testing.assert_allclose(slope, [64, 4, 1])


def double_until_large(x):
    while x < 100:
        x = x * 2
    return x
