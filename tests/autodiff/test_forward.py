"""jvp and hessian_vector as users call them, against torch.func and torch.autograd.functional."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from gradient_cases.reference import evaluator
from onnx import numpy_helper
from torch.nn import functional as F

from archipel import Model, autodiff
from archipel.errors import AutodiffError, MissingRuleError, NotDifferentiableError
from archipel.graph import check_model
from archipel.graph.functions import KEPT

HEAD = '<ir_version: 10, opset_import: ["" : 21]>\n'


def model(text: str) -> Model:
    return Model.from_proto(onnx.parser.parse_model(HEAD + text))


def run(m: Model, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """With ONNX Runtime in float32, which has not all kernels in float64."""
    names = [port.name for port in m.outputs]
    if any(value.dtype == np.float64 for value in inputs.values()):
        return dict(zip(names, evaluator(m.to_bytes()).run(names, inputs)))
    session = onnxruntime.InferenceSession(m.to_bytes(), providers=["CPUExecutionProvider"])
    return dict(zip(names, session.run(names, inputs)))


@dataclass
class Network:
    """A graph of outputs `y` and `loss` and the same in PyTorch, of its inputs and weights in the order of `shapes`."""

    text: str
    shapes: dict[str, tuple[int, ...]]
    function: Callable[..., tuple[torch.Tensor, torch.Tensor]]

    def model(self, values: dict[str, np.ndarray], dtype: str) -> Model:
        """All but `x` and `labels` are weights, and so initializers."""
        proto = onnx.parser.parse_model(HEAD + self.text.replace("real", dtype))
        weights = [port for port in proto.graph.input if port.name not in ("x", "labels")]
        for port in weights:
            proto.graph.input.remove(port)
            proto.graph.initializer.append(numpy_helper.from_array(values[port.name], port.name))
        return Model.from_proto(proto)


LABELS = np.array([0, 2, 1, 1])


def mlp(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = torch.tanh(x @ w + b) @ v
    return y, F.cross_entropy(y, torch.from_numpy(LABELS))


def cnn(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x, kernel, scale, bias, mean, variance, w = tensors
    # Not batch_norm: PyTorch does not differentiate it with respect to its mean and variance.
    mean, variance, scale, bias = (v.reshape(-1, 1, 1) for v in (mean, variance, scale, bias))
    c = F.conv2d(x, kernel, padding=1)
    h = (c - mean) / torch.sqrt(variance * variance + 0.5 + 1e-5) * scale + bias
    y = F.avg_pool2d(F.softplus(h), 2).flatten(1) @ w
    return y, (y**2).mean()


def attention(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x, wq, wk, wv, scale = tensors
    attended = torch.softmax((x @ wq) @ (x @ wk).transpose(1, 2) / 2, -1) @ (x @ wv)
    y = F.layer_norm(x + attended, (4,), scale, eps=1e-5)
    return y, torch.sin(y).mean()


NETWORKS = {
    "MLP": Network(
        """agraph (real[batch, 5] x, real[5, 8] w, real[8] b, real[8, 3] v, int64[batch] labels)
            => (real[batch, 3] y, real loss) {
            a = MatMul (x, w)  z = Add (a, b)  h = Tanh (z)  y = MatMul (h, v)
            loss = SoftmaxCrossEntropyLoss (y, labels)
        }""",
        {"x": (4, 5), "w": (5, 8), "b": (8,), "v": (8, 3)},
        mlp,
    ),
    "CNN": Network(
        """agraph (real[batch, 2, 6, 6] x, real[4, 2, 3, 3] kernel, real[4] scale, real[4] bias, real[4] mean,
                    real[4] variance, real[36, 3] w) => (real[batch, 3] y, real loss)
            <real half = {0.5}> {
            c = Conv <pads = [1, 1, 1, 1]> (x, kernel)
            square = Mul (variance, variance)  positive = Add (square, half)
            n = BatchNormalization (c, scale, bias, mean, positive)  h = Softplus (n)
            p = AveragePool <kernel_shape = [2, 2], strides = [2, 2]> (h)  f = Flatten (p)  y = MatMul (f, w)
            yy = Mul (y, y)  loss = ReduceMean <keepdims = 0> (yy)
        }""",
        {"x": (4, 2, 6, 6), "kernel": (4, 2, 3, 3), "scale": (4,), "bias": (4,), "mean": (4,)}
        | {"variance": (4,), "w": (36, 3)},
        cnn,
    ),
    "attention": Network(
        """agraph (real[batch, time, 4] x, real[4, 4] wq, real[4, 4] wk, real[4, 4] wv, real[4] scale)
            => (real[batch, time, 4] y, real loss)
            <real two = {2}> {
            q = MatMul (x, wq)  k = MatMul (x, wk)  v = MatMul (x, wv)  kt = Transpose <perm = [0, 2, 1]> (k)
            qk = MatMul (q, kt)  s = Div (qk, two)  p = Softmax (s)  a = MatMul (p, v)  r = Add (x, a)
            y = LayerNormalization (r, scale)  z = Sin (y)  loss = ReduceMean <keepdims = 0> (z)
        }""",
        {"x": (4, 6, 4), "wq": (4, 4), "wk": (4, 4), "wv": (4, 4), "scale": (4,)},
        attention,
    ),
}


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch.func.jvp uses it
@pytest.mark.parametrize("dtype", ["double", "float"])
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.sampled(every=6)
def test_networks_equal_pytorch(name: str, dtype: str) -> None:
    network, rng = NETWORKS[name], np.random.default_rng(5)
    kind = np.float64 if dtype == "double" else np.float32
    drawn = [
        {n: (0.7 * rng.standard_normal(shape)).astype(kind) for n, shape in network.shapes.items()} for _ in range(2)
    ]
    values, tangents = drawn
    wrt = list(network.shapes)
    m = network.model(values, dtype)
    feed = {"x": values["x"]} | ({"labels": LABELS} if name == "MLP" else {})
    moving = {f"{n}.tangent": v for n, v in tangents.items()}
    # In float64 throughout: float32 of ours is compared with the exact value.
    tensors, directions = (tuple(torch.from_numpy(v.astype(np.float64)) for v in d.values()) for d in drawn)

    def compare(found: np.ndarray, expected: torch.Tensor) -> None:
        assert found.dtype == kind
        # LayerNormalization computes in float32 whatever its type, as stash_type says.
        error = np.max(np.abs(found - expected.numpy())) / max(float(expected.abs().max()), 1e-6)
        assert error < (1e-4 if dtype == "float" else 1e-5 if name == "attention" else 1e-9)

    pushed = autodiff.jvp(m, of=["y", "loss"], wrt=wrt)
    check_model(pushed.ir)
    assert [port.name for port in pushed.outputs] == ["y", "loss", "y.tangent", "loss.tangent"]
    outputs, expected = torch.func.jvp(network.function, tensors, directions)
    found = run(pushed, feed | moving)
    for of, y, moved in zip(("y", "loss"), outputs, expected):
        compare(found[of], y)
        compare(found[f"{of}.tangent"], moved)

    cotangents = {f"{of}.cotangent": rng.standard_normal(y.shape).astype(kind) for of, y in zip(("y", "loss"), outputs)}
    pulled = run(autodiff.vjp(m, of=["y", "loss"], wrt=wrt), feed | {k: np.asarray(v) for k, v in cotangents.items()})
    _, pull = torch.func.vjp(network.function, *tensors)
    for n, gradient in zip(wrt, pull(tuple(torch.tensor(v, dtype=torch.float64) for v in cotangents.values()))):
        compare(pulled[f"{n}.grad"], gradient)

    curved = autodiff.hessian_vector(m, of="loss", wrt=wrt)
    check_model(curved.ir)
    assert [port.name for port in curved.outputs] == ["y", "loss", *(f"{n}.hvp" for n in wrt)]
    _, products = torch.autograd.functional.hvp(lambda *t: network.function(*t)[1], tensors, directions)
    found = run(curved, feed | moving)
    for n, product in zip(wrt, products):
        compare(found[f"{n}.hvp"], product)


@pytest.mark.sampled(every=3)
def test_only_standard_operators_and_sizes_stay_symbolic() -> None:
    values = {n: np.zeros(shape, np.float32) for n, shape in NETWORKS["attention"].shapes.items()}
    m = NETWORKS["attention"].model(values, "float")
    for made in (autodiff.jvp(m, of=["y"], wrt=["x", "wq"]), autodiff.hessian_vector(m, wrt=["x", "wq"])):
        assert {node.domain for node in made.ir.graph} == {""}
        assert [port.name for port in made.inputs] == ["x", "x.tangent", "wq.tangent"]
        assert {port.shape for port in made.inputs[:2]} == {("batch", "time", 4)}
        assert set(made.parameters) == set(m.parameters)


def test_the_cotangents_leave_nothing_behind() -> None:
    """The jvp of a product and of a sine are what one writes by hand."""
    made = autodiff.jvp(
        model("agraph (double[n] x) => (double[n] y) { s = Sin (x) y = Mul (s, s) }"), of=["y"], wrt=["x"]
    )
    assert sorted(node.op_type for node in made.ir.graph) == ["Add", "Cos", "Mul", "Mul", "Mul", "Sin"]


FUNCTION = """<ir_version: 10, opset_import: ["" : 21, "test.forward" : 1]>
agraph (double[n] x) => (double[n] y) { y = test.forward.Halved (x) }
<opset_import: ["" : 21], domain: "test.forward">
Halved (a) => (b) { two = Constant <value = double {2}> ()  b = Div (a, two) }"""


def test_a_forward_rule_takes_the_place_of_the_transposed_one() -> None:
    key = ("test.forward", "Halved")
    with pytest.raises(
        AutodiffError, match=r"forward_rule: test\.forward::Halved has no gradient rule; add that first"
    ):
        autodiff.forward_rule(*key)(lambda ctx: [])
    results: list[Callable] = [
        lambda ctx: [ctx.op.Mul(ctx.tangent(0), 5.0)],
        lambda ctx: [ctx.op.Cast(ctx.tangent(0), to=1)],
        lambda ctx: [ctx.tangent(0), ctx.tangent(0)],
        lambda ctx: [None],
    ]
    try:
        autodiff.rule(*key)(lambda ctx: [ctx.op.Mul(ctx.cotangent, 3.0)])
        autodiff.forward_rule(*key)(lambda ctx: results[0](ctx))
        with pytest.raises(AutodiffError, match=r"Halved already has one, in .*test_forward\.py"):
            autodiff.forward_rule(*key)(lambda ctx: [])
        m = Model.from_proto(onnx.parser.parse_model(FUNCTION))
        feed = {"x": np.ones(2), "x.tangent": np.ones(2)}
        assert run(autodiff.jvp(m, of=["y"], wrt=["x"]), feed)["y.tangent"].tolist() == [5.0, 5.0]
        pulled = run(autodiff.vjp(m, of=["y"], wrt=["x"]), {"x": np.ones(2), "y.cotangent": np.ones(2)})
        assert pulled["x.grad"].tolist() == [3.0, 3.0]
        for message in (r"tangent 0 is FLOAT\['n'\], the output DOUBLE", "2 tangents for 1 outputs"):
            del results[0]
            with pytest.raises(AutodiffError, match=rf"^forward rule for Halved \(.*\), node '.*': {message}"):
                autodiff.jvp(m, of=["y"], wrt=["x"])
        del results[0]
        assert run(autodiff.jvp(m, of=["y"], wrt=["x"]), feed)["y.tangent"].tolist() == [0.0, 0.0]
    finally:
        for table in (autodiff.RULES, autodiff.FORWARD):
            table.pop(key, None)
        KEPT.discard(key)


def test_normalizations_and_convolutions_are_pushed_directly() -> None:
    """No node that unfolds windows or reads at run time which axes broadcast, as the transposed rules emit."""
    values = {n: np.zeros(shape, np.float32) for n, shape in NETWORKS["attention"].shapes.items()}
    made = autodiff.jvp(NETWORKS["attention"].model(values, "float"), of=["y"], wrt=["x", "wq", "scale"])
    assert "NonZero" not in {node.op_type for node in made.ir.graph}
    assert len(made.ir.graph) <= 48
    m = model("""agraph (float[n, 2, 8, 8] x, float[3, 2, 3, 3] w, float[3] b) => (float[n, 3, 6, 6] y) {
        y = Conv (x, w, b)
    }""")
    made = autodiff.jvp(m, of=["y"], wrt=["x", "w", "b"])
    assert sorted(node.op_type for node in made.ir.graph) == ["Add", "Conv", "Conv", "Conv"]


def test_third_derivatives_by_composition() -> None:
    made = model("agraph (double[n] x) => (double[n] y) { y = Sin (x) }")
    for order in range(3):
        made = autodiff.jvp(made, of=["y" + ".tangent" * order], wrt=["x"])
    tangents = ["x.tangent", "x.tangent.tangent", "x.tangent.tangent.tangent"]
    assert [port.name for port in made.inputs] == ["x", *tangents]
    rng = np.random.default_rng(0)
    feed = {name: rng.standard_normal(5) for name in ["x", *tangents]}
    expected = -np.cos(feed["x"]) * np.prod([feed[name] for name in tangents], axis=0)
    np.testing.assert_allclose(run(made, feed)["y.tangent.tangent.tangent"], expected, rtol=1e-12)


def test_hessian_vector_is_the_jvp_of_the_gradient() -> None:
    network, rng = NETWORKS["MLP"], np.random.default_rng(1)
    values = {n: rng.standard_normal(shape) for n, shape in network.shapes.items()}
    m = network.model(values, "double")
    forward_over_reverse = autodiff.jvp(autodiff.gradient(m, wrt=["w", "v"]), of=["w.grad", "v.grad"], wrt=["w", "v"])
    feed = {"x": values["x"], "labels": LABELS}
    feed |= {f"{n}.tangent": rng.standard_normal(network.shapes[n]) for n in ("w", "v")}
    expected, found = run(forward_over_reverse, feed), run(autodiff.hessian_vector(m, wrt=["w", "v"]), feed)
    for n in ("w", "v"):
        np.testing.assert_allclose(found[f"{n}.hvp"], expected[f"{n}.grad.tangent"], rtol=1e-9, atol=1e-12)


def test_inner_values_that_a_rule_replaces() -> None:
    """The rule of InstanceNormalization puts a value of its own in place of `h`."""
    m = model("""agraph (double[2, 3, 5] x, double[3] g, double[3] b) => (double loss) {
        h = InstanceNormalization (x, g, b)  c = Mul (h, h)  d = Mul (c, h)  loss = ReduceSum <keepdims = 0> (d)
    }""")
    rng = np.random.default_rng(2)
    feed = {"x": rng.standard_normal((2, 3, 5)), "g": np.ones(3), "b": np.zeros(3)}
    feed |= {"x.tangent": np.zeros((2, 3, 5)), "h.tangent": rng.standard_normal((2, 3, 5))}
    found = run(autodiff.hessian_vector(m, of="loss", wrt=["h", "x"]), feed)["h.hvp"]
    h = F.instance_norm(torch.from_numpy(feed["x"]), eps=1e-5).numpy()
    np.testing.assert_allclose(found, 6 * h * feed["h.tangent"], rtol=1e-5)


def test_what_does_not_depend_or_is_straight_has_zeros() -> None:
    m = model("""agraph (double[n] x, double[n] z) => (double[n] r, double loss) {
        r = Relu (x)  loss = ReduceSum <keepdims = 0> (r)
    }""")
    feed = {"x": np.array([1.0, -2.0, 3.0]), "z": np.ones(3)}
    feed |= {"x.tangent": np.ones(3), "z.tangent": np.ones(3)}
    found = run(autodiff.hessian_vector(m, wrt=["x", "z"]), feed)
    assert found["x.hvp"].tolist() == found["z.hvp"].tolist() == [0.0, 0.0, 0.0]
    del feed["x.tangent"]
    assert run(autodiff.jvp(m, of=["r"], wrt=["z"]), feed)["r.tangent"].tolist() == [0.0, 0.0, 0.0]


def test_kinks_and_places_of_a_gradient_have_zeros() -> None:
    """As in PyTorch, where a model's own step would be refused."""
    m = model("""agraph (double[n] x) => (double[k] y, double[n] z)  <int64[1] one = {1}> {
        r = Relu (x)  y, i = TopK (r, one)  d = Greater (x, r)  z = Cast <to = 11> (d)
    }""")
    pulled = autodiff.vjp(m, of=["y"], wrt=["x"])
    made = autodiff.jvp(autodiff.vjp(pulled, of=["x.grad"], wrt=["x"]), of=["x.grad.grad"], wrt=["x"])
    names = [port.name for port in made.inputs]
    found = run(made, {name: np.ones(1 if name == "y.cotangent" else 3) for name in names})
    assert found["x.grad"].sum() == 1.0
    assert found["x.grad.grad"].tolist() == found["x.grad.grad.tangent"].tolist() == [0.0, 0.0, 0.0]
    with pytest.raises(NotDifferentiableError, match="only through Greater"):
        autodiff.vjp(m, of=["z"], wrt=["x"])


def test_equal_values_are_told_apart() -> None:
    m = model("agraph (double[n] a, double[n] b) => (double[n] c) { c = Add (a, b) }")
    made = autodiff.jvp(m, of=["c"], wrt=["a", "b", "c"])
    assert [port.name for port in made.outputs] == ["c", "c.tangent.tangent"]  # c.tangent is an input
    feed = {"a": np.zeros(2), "b": np.zeros(2), "a.tangent": np.array([1.0, 2.0])}
    feed |= {"b.tangent": np.array([10.0, 20.0]), "c.tangent": np.array([100.0, 200.0])}
    assert run(made, feed)["c.tangent.tangent"].tolist() == [111.0, 222.0]


INTEGER = "agraph (double[n] x, int64[n] k) => (double[n] y, int64[n] i) { y = Exp (x) i = Neg (k) }"
SCALAR = "agraph (double[n] x) => (double s) { s = ReduceSum <keepdims = 0> (x) }"

ERRORS: dict[str, tuple[Callable, str, dict, type[Exception], str]] = {
    "unknown of": (autodiff.jvp, INTEGER, {"of": ["z"], "wrt": ["x"]}, AutodiffError, "of: the model has no value 'z'"),
    "unknown wrt": (
        autodiff.jvp,
        INTEGER,
        {"of": ["y"], "wrt": ["z"]},
        AutodiffError,
        "wrt: .* no value 'z'; it has: x",
    ),
    "integer": (autodiff.jvp, INTEGER, {"of": ["y"], "wrt": ["k"]}, NotDifferentiableError, "wrt: 'k' is int64"),
    "integer of": (autodiff.jvp, INTEGER, {"of": ["i"], "wrt": ["x"]}, NotDifferentiableError, "of: 'i' is int64"),
    "empty": (autodiff.jvp, INTEGER, {"of": [], "wrt": ["x"]}, AutodiffError, "of is empty"),
    "twice": (autodiff.hessian_vector, SCALAR, {"of": "s", "wrt": ["x", "x"]}, AutodiffError, "wrt names x twice"),
    "several elements": (
        autodiff.hessian_vector,
        INTEGER,
        {"of": "y", "wrt": ["x"]},
        AutodiffError,
        r"of='y' has shape \['n'\], a second derivative needs one element; reduce it to a scalar$",
    ),
    "list": (
        autodiff.hessian_vector,
        INTEGER,
        {"of": ["y"], "wrt": ["x"]},
        AutodiffError,
        "hessian_vector takes the name of one value, a string$",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors_say_what_to_do(case: str) -> None:
    transform, text, arguments, error, message = ERRORS[case]
    with pytest.raises(error, match=re.compile(message)) as caught:
        transform(model(text), **arguments)
    assert "\n" not in str(caught.value)


def test_a_second_sweep_says_that_a_node_of_the_gradient_has_no_rule() -> None:
    @autodiff.rule("test.archipel", "Kinked")
    def rule(ctx: autodiff.RuleContext) -> list:
        return [ctx.op.Hardmax(ctx.op.Mul(ctx.cotangent, ctx.input(0)))]

    try:
        made = Model.from_proto(
            onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 21, "test.archipel" : 1]>
            agraph (double[n] x) => (double s) <double[n] y> { [k] y = test.archipel.Kinked (x) s = ReduceSum (y) }""")
        )
        reason = r"a node of it has no derivative: no gradient rule for Hardmax \(node 'k.vjp/"
        with pytest.raises(MissingRuleError, match="^jvp differentiates a gradient, and " + reason):
            autodiff.jvp(made, of=["s"], wrt=["x"])
        with pytest.raises(MissingRuleError, match="^hessian_vector differentiates a gradient, and " + reason):
            autodiff.hessian_vector(made, of="s", wrt=["x"])
    finally:
        autodiff.RULES.pop(("test.archipel", "Kinked"), None)
