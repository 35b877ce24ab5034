"""Derivatives of third order by composition, against functions whose derivatives are known and against torch.func."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
import torch
from gradient_cases.reference import evaluator

from archipel import Model
from archipel.autodiff import gradient, hessian_vector, jvp, vjp

HEAD = '<ir_version: 10, opset_import: ["" : 21]>\n'
X = np.array([0.4, 1.3, 2.2])


def model(text: str) -> Model:
    return Model.from_proto(onnx.parser.parse_model(HEAD + text))


def run(m: Model, feed: dict[str, np.ndarray], name: str) -> np.ndarray:
    feed = {port.name: feed[port.name] for port in m.inputs}
    return evaluator(m.to_bytes()).run([name], feed)[0]


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


# Operator -> its third derivative.
THIRD: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "Exp": np.exp,
    "Sin": lambda x: -np.cos(x),
    "Cos": np.sin,
    "Log": lambda x: 2 / x**3,
    "Reciprocal": lambda x: -6 / x**4,
    "Sqrt": lambda x: 3 / 8 * x**-2.5,
    "Tanh": lambda x: -2 * (1 - np.tanh(x) ** 2) * (1 - 3 * np.tanh(x) ** 2),
    "Sigmoid": lambda x: sigmoid(x) * sigmoid(-x) * (1 - 6 * sigmoid(x) * sigmoid(-x)),
    "Softplus": lambda x: sigmoid(x) * sigmoid(-x) * (1 - 2 * sigmoid(x)),
    "Erf": lambda x: 2 / np.sqrt(np.pi) * (4 * x**2 - 2) * np.exp(-(x**2)),
}
# g: a vjp of the last output, j: a jvp of it, h: a Hessian-vector product, which is two orders and comes first.
ORDERS = ["ggg", "jjj", "gjg", "hj"]


def raise_order(m: Model, steps: str) -> tuple[Model, str]:
    """The model after these transformations, and the name of the output that they added last."""
    of = "y"
    for step in steps:
        before = {port.name for port in m.outputs}
        if step == "h":
            m = hessian_vector(m, of="s", wrt=["x"])
        elif step == "j":
            m = jvp(m, of=[of], wrt=["x"])
        else:
            m = vjp(m, of=[of], wrt=["x"])
        (of,) = [port.name for port in m.outputs if port.name not in before]
    return m, of


@pytest.mark.parametrize("op_type", THIRD)
@pytest.mark.sampled(every=6)
def test_elementwise_functions(op_type: str) -> None:
    """Elementwise, so every composition gives the third derivative times the product of all tangents and cotangents."""
    body = f"y = {op_type} (x)  s = ReduceSum <keepdims = 0> (y)"
    plain = model(f"agraph (double[n] x) => (double[n] y, double s) {{ {body} }}")
    for steps in ORDERS:
        m, of = raise_order(plain, steps)
        rng = np.random.default_rng(1)
        feed = {"x": X} | {port.name: rng.standard_normal(3) for port in m.inputs if port.name != "x"}
        weights = np.prod([value for name, value in feed.items() if name != "x"], axis=0)
        np.testing.assert_allclose(run(m, feed, of), THIRD[op_type](X) * weights, rtol=1e-8, err_msg=steps)


NETWORK = """agraph (double[n, 3] x) => (double s)
    <double[3, 4] w = {0.3, -1, 0.5, 0.7, 1, 0.1, -0.4, 0.7, 0.9, -0.2, 0.2, 0.6},
     double[4] b = {0.1, -0.2, 0.3, 0.4}> {
    a = MatMul (x, w)  z = Add (a, b)  h = Tanh (z)  p = Softmax (h)  q = Mul (p, h)  r = LogSoftmax (q)
    t = Mul (r, a)  s = ReduceSum <keepdims = 0> (t)
}"""


def network(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a = x @ w
    h = torch.tanh(a + b)
    return (torch.log_softmax(torch.softmax(h, -1) * h, -1) * a).sum()


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch.func.jvp uses it
@pytest.mark.sampled(every=4)
def test_a_network_equals_torch_func() -> None:
    m, rng = model(NETWORK), np.random.default_rng(2)
    x, u, v = (rng.standard_normal((2, 3)) for _ in range(3))
    weights = [torch.from_numpy(m.parameters[name]) for name in ("w", "b")]
    tensors = [torch.from_numpy(value) for value in (x, u, v)]

    def f(point: torch.Tensor) -> torch.Tensor:
        return network(point, *weights)

    first = torch.func.grad(f)
    second = torch.func.grad(lambda p: (first(p) * tensors[1]).sum())
    third = torch.func.grad(lambda p: (second(p) * tensors[2]).sum())(tensors[0]).numpy()
    scalar = (torch.from_numpy(third) * tensors[1]).sum().numpy()

    reverse = vjp(vjp(gradient(m, of="s", wrt=["x"]), of=["x.grad"], wrt=["x"]), of=["x.grad.grad"], wrt=["x"])
    feed = {"x": x, "x.grad.cotangent": u, "x.grad.grad.cotangent": v}
    np.testing.assert_allclose(run(reverse, feed, "x.grad.grad.grad"), third, rtol=1e-7, atol=1e-10)

    along = jvp(hessian_vector(m, of="s", wrt=["x"]), of=["x.hvp"], wrt=["x"])
    feed = {"x": x, "x.tangent": u, "x.tangent.tangent": v}
    np.testing.assert_allclose(run(along, feed, "x.hvp.tangent"), third, rtol=1e-7, atol=1e-10)

    back = vjp(hessian_vector(m, of="s", wrt=["x"]), of=["x.hvp"], wrt=["x"])
    np.testing.assert_allclose(
        run(back, {"x": x, "x.tangent": u, "x.hvp.cotangent": v}, "x.grad"), third, rtol=1e-7, atol=1e-10
    )

    forward = jvp(jvp(jvp(m, ["s"], ["x"]), ["s.tangent"], ["x"]), ["s.tangent.tangent"], ["x"])
    feed = {"x": x, "x.tangent": u, "x.tangent.tangent": v, "x.tangent.tangent.tangent": u}
    np.testing.assert_allclose(run(forward, feed, "s.tangent.tangent.tangent"), scalar, rtol=1e-7)


def test_two_gradients_that_are_one_value() -> None:
    """sum((a + b)^3): both gradients are 3 (a + b)^2, and move along both tangents."""
    m = model("""agraph (double[n] a, double[n] b) => (double loss) {
        s = Add (a, b)  q = Mul (s, s)  c = Mul (q, s)  loss = ReduceSum <keepdims = 0> (c)
    }""")
    curved = hessian_vector(m, wrt=["a", "b"])
    feed = {"a": X, "b": -0.5 * X, "a.tangent": X**2, "b.tangent": np.ones(3)}
    expected = 6 * (0.5 * X) * (X**2 + 1)
    for name in ("a.hvp", "b.hvp"):
        np.testing.assert_allclose(run(curved, feed, name), expected, rtol=1e-12)
