"""JAX as an oracle: grad, jvp, vmap and hessian of the functions in scripts/make_jax_vectors.py, as graphs here."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from gradient_cases.reference import evaluator

from archipel import Model
from archipel.autodiff import gradient, hessian_vector, jvp, vmap
from tests.support.environments import other_python

ROOT = Path(__file__).resolve().parents[2]
VECTORS: dict[str, Any] = json.loads((ROOT / "vectors" / "jax" / "derivatives.json").read_text())

# Name -> the constants behind x, and the nodes.
FUNCTIONS: dict[str, tuple[str, str]] = {
    "exp of sin": ("", "t = Sin (x)  y = Exp (t)"),
    "rational": ("", "q = Mul (x, x)  r = Add (q, one)  y = Div (x, r)"),
    "power": ("", "q = Mul (x, x)  r = Add (q, one)  e = Constant <value = double {1.7}> ()  y = Pow (r, e)"),
    "log-sum-exp": ("", "q = Mul (x, x)  y = ReduceLogSumExp <keepdims = 0> (q, first)"),
    "softmax": ("", "y = Softmax <axis = 0> (x)"),
    "log-softmax": ("", "t = Sin (x)  y = LogSoftmax (t)"),
    "Gram matrix": ("", "t = Transpose (x)  y = MatMul (x, t)"),
    "perceptron": ("w b v", "a = Gemm (x, k0, k1)  h = Tanh (a)  y = MatMul (h, k2)"),
    "gelu": ("", "y = Gelu (x)"),
    "layer norm": (
        "w",
        "m = ReduceMean (x, first)  a = Sub (x, m)  aa = Mul (a, a)  p = ReduceMean (aa, first)  q = Add (p, half)\n"
        "r = Sqrt (q)  n = Div (a, r)  y = Mul (n, k0)",
    ),
    "convolution": ("w", "y = Conv <strides = [2, 1], pads = [1, 0, 1, 2]> (x, k0)"),
    "average pooling": (
        "",
        "q = Mul (x, x)  t = Mul (q, x)  y = AveragePool <kernel_shape = [2, 2], strides = [2, 2]> (t)",
    ),
    "attention": (
        "w",
        "q = MatMul (x, k0)  t = Transpose (x)  s0 = MatMul (q, t)  p = Softmax (s0)  h = Tanh (x)  y = MatMul (p, h)",
    ),
    "where": (
        "",
        "l = Constant <value = double {0.1}> ()  m = Greater (x, l)  q = Mul (x, x)  t = Mul (q, x)  e = Exp (x)\n"
        "y = Where (m, t, e)",
    ),
    "running sum": ("", "q = Mul (x, x)  t = CumSum (q, zero)  y = Mul (t, x)"),
    "rows by index": (
        "",
        "i = Constant <value = int64[3] {2, 0, 0}> ()  r = Gather (x, i)  rr = Mul (r, r)  y = Mul (rr, r)",
    ),
    "scattered sum": (
        "",
        "i = Constant <value = int64[4] {0, 2, 0, 1}> ()  z = Constant <value = double[3] {0, 0, 0}> ()\n"
        'q = Mul (x, x)  t = Mul (q, x)  u = ScatterElements <reduction = "add"> (z, i, t)  y = Mul (u, u)',
    ),
    "largest times mean": (
        "",
        "a = ReduceMax <keepdims = 0> (x, first)  q = Mul (x, x)  m = ReduceMean <keepdims = 0> (q, first)\n"
        "y = Mul (a, m)",
    ),
    "product of three": ("w", 'y = Einsum <equation = "ij,jk,kl->il"> (x, k0, x)'),
    "unit vector": ("", "y = LpNormalization (x)"),
    "Rosenbrock": (
        "",
        "three = Constant <value = int64[1] {3}> ()  four = Constant <value = int64[1] {4}> ()\n"
        "from = Constant <value = int64[1] {0}> ()  a = Slice (x, from, three)  b = Slice (x, first, four)\n"
        "aa = Mul (a, a)  d = Sub (b, aa)  dd = Mul (d, d)  h = Constant <value = double {100}> ()  f = Mul (h, dd)\n"
        "e = Sub (one, a)  ee = Mul (e, e)  y = Add (f, ee)",
    ),
    "recurrence": (
        "w",
        """z = Constant <value = double[2] {0, 0}> ()
        last, y = Scan <num_scan_inputs = 1, body = step (double[2] h, double[2] item)
            => (double[2] next, double[2] out) {
            p = MatMul (h, k0)  q = Add (item, p)  next = Tanh (q)  out = Identity (next)
        }> (z, x)""",
    ),
    "Newton's method": (
        "",
        """q = Mul (x, x)  r = Add (q, one)  z = Div (r, r)  n = Constant <value = int64 {3}> ()
        y = Loop <body = step (int64 i, bool go, double[3] g) => (bool on, double[3] next) {
            on = Identity (go)  d = Div (r, g)  t = Add (g, d)  next = Mul (t, half)
        }> (n, , z)""",
    ),
    "branches": (
        "",
        """t = ReduceSum <keepdims = 0> (x)  o = Constant <value = double {0}> ()  m = Greater (t, o)
        y = If (m) <
            then_branch = yes () => (double[3] a) { u = Sin (x)  a = Mul (u, x) },
            else_branch = no () => (double[3] b) { e = Exp (x)  ex = Mul (e, x)  b = Mul (ex, x) }
        >""",
    ),
}


def field(name: str, content: Any) -> str:
    return f"double[{', '.join(map(str, np.shape(content)))}] {name}"


def model(name: str) -> Model:
    """y, and s = sum of c y."""
    part, (_, nodes) = VECTORS[name], FUNCTIONS[name]
    inputs = [field("x", part["x"]), field("c", part["c"])]
    inputs += [field(f"k{i}", k) for i, k in enumerate(part["constants"])]
    return Model.from_proto(
        onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["" : 21]>
        agraph ({", ".join(inputs)}) => ({field("y", part["y"])}, double s)
            <double one = {{1}}, double half = {{0.5}}, int64[1] first = {{1}}, int64 zero = {{0}}> {{
            {nodes}
            cy = Mul (c, y)  s = ReduceSum <keepdims = 0> (cy)
        }}""")
    )


def run(m: Model, feed: dict[str, np.ndarray], name: str) -> np.ndarray:
    return evaluator(m.to_bytes()).run([name], {port.name: feed[port.name] for port in m.inputs})[0]


def test_all_functions_are_here() -> None:
    assert list(FUNCTIONS) == list(VECTORS)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.sampled(every=6)
def test_derivatives_equal_those_of_jax(name: str) -> None:
    m, part = model(name), VECTORS[name]
    feed = {key: np.array(part[key]) for key in ("x", "c")}
    feed |= {f"k{i}": np.array(k) for i, k in enumerate(part["constants"])}

    def equal(found: np.ndarray, key: str) -> None:
        expected = np.array(part[key])
        np.testing.assert_allclose(found.reshape(expected.shape), expected, rtol=1e-7, atol=1e-9, err_msg=key)

    equal(run(m, feed, "y"), "y")
    slope = gradient(m, of="s", wrt=["x"])
    equal(run(slope, feed, "x.grad"), "gradient")
    equal(run(jvp(m, of=["y"], wrt=["x"]), feed | {"x.tangent": np.array(part["v"])}, "y.tangent"), "tangent")
    points = np.array(part["points"])
    each = run(vmap(slope, over=["x"], size=len(points)), feed | {"x": points}, "x.grad")
    if name == "convolution":  # linear: what does not depend on x has no lanes
        each = np.stack([each] * len(points))
    equal(each, "gradients")
    # A lane for each column of the Hessian.
    size = feed["x"].size
    columns = vmap(hessian_vector(m, of="s", wrt=["x"]), over=["x.tangent"], size=size)
    found = run(columns, feed | {"x.tangent": np.eye(size).reshape(size, *feed["x"].shape)}, "x.hvp")
    equal(np.broadcast_to(found, (size, *feed["x"].shape)), "hessian")


@pytest.mark.slow
def test_the_vectors_are_what_jax_says() -> None:
    """JAX in an environment of its own: JAX_PYTHON, or one that is made here."""
    python = os.environ.get("JAX_PYTHON") or other_python("jax", "jax[cpu]")
    script = ROOT / "scripts" / "make_jax_vectors.py"
    told = subprocess.run([python, script, "--check"], capture_output=True, text=True, check=True).stdout
    assert told.startswith(f"{len(VECTORS)} functions: as in derivatives.json")
