"""Passes after differentiation: what they take out, and that the results stay."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

from archipel import Model
from archipel.graph import check_model
from archipel.graph.passes import optimize

HEADER = '<ir_version: 10, opset_import: ["" : 21]>\n'

# name: (graph, operators that are left)
CASES = {
    "momentum": (
        """g (float[b, 3] d, float[b, 80] x, float[3, 80] v) => (float[3, 80] y) <float m = {0.9}> {
            product = Gemm <transA = 1, alpha = 2.0> (d, x)  kept = Mul (m, v)  y = Add (kept, product)
        }""",
        {"Gemm": 1},
    ),
    "descent scales the narrow operand": (
        """g (float[b, 3] d, float[b, 80] x, float[3, 80] p, float lr) => (float[3, 80] y) {
            product = Gemm <transA = 1> (d, x)  change = Mul (product, lr)  y = Sub (p, change)
        }""",
        {"Gemm": 1, "Mul": 1, "Neg": 1},
    ),
    "descent of a tall matrix": (
        """g (float[b, 80] d, float[b, 3] x, float[80, 3] p, float lr) => (float[80, 3] y) {
            product = Gemm <transA = 1> (d, x)  change = Mul (lr, product)  y = Sub (p, change)
        }""",
        {"Gemm": 1, "Mul": 1, "Neg": 1},
    ),
    "descent of a small matrix stays": (
        """g (float[b, 4] d, float[b, 3] x, float[4, 3] p, float lr) => (float[4, 3] y) {
            product = Gemm <transA = 1> (d, x)  change = Mul (lr, product)  y = Sub (p, change)
        }""",
        {"Gemm": 1, "Mul": 1, "Sub": 1},
    ),
    "a product that is read twice stays": (
        """g (float[b, 3] d, float[b, 80] x, float[3, 80] v) => (float[3, 80] y, float[3, 80] z) {
            product = Gemm <transA = 1> (d, x)  y = Add (v, product)  z = Exp (product)
        }""",
        {"Gemm": 1, "Add": 1, "Exp": 1},
    ),
    "the transpose of a product": (
        """g (float[b, 3] x, float[b, 80] d) => (float[80, 3] y) {
            t = Transpose (x)  product = MatMul (t, d)  y = Transpose (product)
        }""",
        {"Gemm": 1},
    ),
    "the transpose of a scaled product of transposed factors": (
        """g (float[80, b] x, float[3, b] d) => (float[3, 80] y) {
            t = Transpose (d)  product = Gemm <alpha = 0.5> (x, t)  y = Transpose <perm = [1, 0]> (product)
        }""",
        {"Gemm": 1},
    ),
    "a weight behind a Transpose": (
        """g (float[b, 3] x, float[5, 3] w, float[5] c) => (float[b, 5] y) {
            t = Transpose (w)  m = MatMul (x, t)  y = Add (m, c)
        }""",
        {"Gemm": 1, "Add": 1},
    ),
    "the transpose of a product that is read twice stays": (
        """g (float[3, b] x, float[b, 80] d) => (float[80, 3] y, float[3, 80] z) {
            product = MatMul (x, d)  y = Transpose (product)  z = Exp (product)
        }""",
        {"MatMul": 1, "Transpose": 1, "Exp": 1},
    ),
    "the transpose of stacked products stays": (
        """g (float[2, 3, b] x, float[2, b, 80] d) => (float[2, 80, 3] y) {
            product = MatMul (x, d)  y = Transpose <perm = [0, 2, 1]> (product)
        }""",
        {"MatMul": 1, "Transpose": 1},
    ),
    "slices side by side": (
        """g (float[2, 3] a, float[2, 1] c, float[2, 2] e) => (float[2, 6] y)
        <int64[4] p = {0, 2, 0, 1}, int64[4] q = {0, 5, 0, 0}, int64[4] r = {0, 0, 0, 4}> {
            pa = Pad (a, p)  pc = Pad (c, q)  pe = Pad (e, r)  s = Add (pa, pc)  y = Add (s, pe)
        }""",
        {"Concat": 1},
    ),
    "slices side by side, and something else": (
        """g (float[2, 3] a, float[2, 3] c, float[2, 6] v) => (float[2, 6] y)
        <int64[4] p = {0, 3, 0, 0}, int64[4] q = {0, 0, 0, 3}> {
            pa = Pad (a, p)  pc = Pad (c, q)  s = Add (pa, pc)  y = Add (v, s)
        }""",
        {"Concat": 1, "Add": 1},
    ),
    "slices of a batch": (
        """g (float[b, 1, 2] a, float[b, 2, 2] c) => (float[b, 3, 2] y)
        <int64[6] p = {0, 0, 0, 0, 2, 0}, int64[6] q = {0, 1, 0, 0, 0, 0}> {
            pa = Pad (a, p)  pc = Pad (c, q)  y = Add (pa, pc)
        }""",
        {"Concat": 1},
    ),
    "slices that overlap stay": (
        """g (float[2, 3] a, float[2, 4] c) => (float[2, 6] y) <int64[4] p = {0, 3, 0, 0}, int64[4] q = {0, 0, 0, 2}> {
            pa = Pad (a, p)  pc = Pad (c, q)  y = Add (pa, pc)
        }""",
        {"Pad": 2, "Add": 1},
    ),
    "slices with a gap stay": (
        """g (float[2, 3] a, float[2, 2] c) => (float[2, 6] y) <int64[4] p = {0, 3, 0, 0}, int64[4] q = {0, 0, 0, 4}> {
            pa = Pad (a, p)  pc = Pad (c, q)  y = Add (pa, pc)
        }""",
        {"Pad": 2, "Add": 1},
    ),
    "zeros": (
        """g (float[2, 3] a, float[2, 3] c) => (float[2, 3] y) <float zero = {0}> {
            n = Mul (c, zero)  s = Add (a, n)  d = Sub (n, s)  e = Sub (d, n)  y = Exp (e)
        }""",
        {"Neg": 1, "Exp": 1},
    ),
    "a zero that broadcasts stays": (
        """g (float[3] a) => (float[2, 3] y) <float[2, 3] zero = {0, 0, 0, 0, 0, 0}> { y = Add (a, zero) }""",
        {"Add": 1},
    ),
    "casts and transposes cancel": (
        """g (float[2, 3] a, float[2, 3] c) => (float[2, 3] y) {
            t = Transpose <perm = [1, 0]> (a)  u = Transpose <perm = [1, 0]> (t)  v = Cast <to = 1> (u)
            y = Add (v, c)
        }""",
        {"Add": 1},
    ),
    "scalars beside a last axis of 1": (
        """g (float[3, 2, 1, 1] a, float[3, 2, 1, 1] c, float s) => (float[3, 2, 1, 1] y, float[3, 2, 1, 1] z)
        <float half = {0.5}> { h = Mul (a, half)  y = Mul (h, s)  z = Sub (s, c) }""",
        {"Mul": 2, "Sub": 1, "Reshape": 1},
    ),
    "single elements of a higher rank stay": (
        "g (float[1, 1, 1] x, float[b, 1] y) => (float[1, b, 1] z) { z = Add (x, y) }",
        {"Add": 1},
    ),
    "scalars beside long rows stay": (
        "g (float[3, 2] a, float s) => (float[3, 2] y) { y = Mul (a, s) }",
        {"Mul": 1},
    ),
    "rounding casts stay": (
        """g (float[2, 3] a) => (float[2, 3] y) { h = Cast <to = 10> (a)  y = Cast <to = 1> (h) }""",
        {"Cast": 2},
    ),
    "one": ("g (float[2] a) => (float[2] y) <float one = {1}> { m = Mul (one, a) y = Exp (m) }", {"Exp": 1}),
    "zeros with more rows stay": (
        "g (float[2] a) => (float[3, 2] y) <float[3, 2] z = {0, 0, 0, 0, 0, 0}> { s = Add (a, z) y = Exp (s) }",
        {"Add": 1, "Exp": 1},
    ),
    "zeros minus something": (
        "g (float[2] a) => (float[2] y) <float[2] z = {0, 0}> { s = Sub (z, a) y = Exp (s) }",
        {"Neg": 1, "Exp": 1},
    ),
    "common subexpressions": (
        "g (float[2] a) => (float[2] y) { b = Exp (a) c = Exp (a) y = Add (b, c) }",
        {"Exp": 1, "Add": 1},
    ),
    "tiled kernels are not folded": (
        """g (float[b, 2, 4] a) => (float[b, 4, 3] y) <float[2, 1, 2] eye = {1, 0, 0, 1}, int64[3] twice = {2, 1, 1}> {
            kernel = Tile (eye, twice)  y = Conv <group = 2> (a, kernel)
        }""",
        {"Tile": 1, "Conv": 1},
    ),
    "inside a loop": (
        """g (float[t, 2, 3] d, float[t, 2, 80] x, float[3, 80] p, float lr) => (float[3, 80] y) {
            y = Scan <num_scan_inputs = 2, body =
                step (float[3, 80] w, float[2, 3] di, float[2, 80] xi) => (float[3, 80] n) {
                    q = Gemm <transA = 1> (di, xi)  c = Mul (q, lr)  n = Sub (w, c)
                }
            > (p, d, x)
        }""",
        {"Scan": 1, "Gemm": 1, "Mul": 1, "Neg": 1},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_pattern(name: str) -> None:
    text, left = CASES[name]
    model = Model.from_proto(onnx.parser.parse_model(HEADER + text))
    before = model.to_bytes()
    optimize(model.ir)
    check_model(model.ir)
    assert Counter(node.op_type for node in model.ir.graph.all_nodes()) == left
    rng = np.random.default_rng(0)
    sizes = {"b": 5, "t": 4}
    feed = {
        port.name: np.asarray(rng.standard_normal([sizes.get(d, d) for d in port.shape]), np.float32)
        for port in model.inputs
    }
    for found, expected in zip(
        ReferenceEvaluator(model.to_bytes()).run(None, feed), ReferenceEvaluator(before).run(None, feed)
    ):
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)


def test_constants_become_tensors_in_bodies_too() -> None:
    text = """g (float[2] x, bool c) => (float[2] y) {
        one = Constant <value_floats = [1.0, 2.0]> ()
        z = If (c) <
            then_branch = t () => (float[2] a) { two = Constant <value_float = 2.0> () a = Mul (x, two) },
            else_branch = e () => (float[2] b) {
                n = Constant <value_ints = [2]> () f = CastLike (n, x) b = Mul (x, f)
            }>
        y = Add (z, one)
    }"""
    model = Model.from_proto(onnx.parser.parse_model(HEADER + text))
    before = model.to_bytes()
    optimize(model.ir)
    constants = [node for node in model.ir.graph.all_nodes() if node.op_type == "Constant"]
    assert [list(node.attributes) for node in constants] == [["value"]] * 3
    for given in (True, False):
        feed = {"x": np.array([3, 5], np.float32), "c": np.array(given)}
        [expected], [found] = (ReferenceEvaluator(each).run(None, feed) for each in (before, model.to_bytes()))
        np.testing.assert_array_equal(found, expected)
