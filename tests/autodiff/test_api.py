"""gradient and vjp as users call them: names, order, zeros, composition, and every error's text."""

from __future__ import annotations

import re

import numpy as np
import onnx
import pytest
import torch
from gradient_cases.reference import evaluator
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from archipel import Model, autodiff
from archipel.errors import AutodiffError, MissingRuleError, NotDifferentiableError
from archipel.graph import Builder, check_model


def model(text: str) -> Model:
    """From ONNX's own text form."""
    return Model.from_proto(onnx.parser.parse_model('<ir_version: 10, opset_import: ["" : 21]>\n' + text))


def run(m: Model, **inputs: object) -> dict[str, np.ndarray]:
    names = [port.name for port in m.outputs]
    return dict(zip(names, evaluator(m.to_bytes()).run(names, {k: np.asarray(v) for k, v in inputs.items()})))


REGRESSION = """
agraph (double[batch, 3] x, double[batch, 2] y) => (double[batch, 2] z, double loss)
    <double[3, 2] w = {1, -2, 3, 0.5, -1, 2}, double[2] b = {0.25, -0.5}>
{
    product = MatMul (x, w)
    z = Add (product, b)
    e = Sub (z, y)
    square = Mul (e, e)
    loss = ReduceMean <keepdims = 0> (square)
}
"""


def test_gradient_keeps_outputs_and_adds_one_per_name() -> None:
    g = autodiff.gradient(model(REGRESSION), of="loss", wrt=["w", "x", "b"])
    assert [port.name for port in g.outputs] == ["z", "loss", "w.grad", "x.grad", "b.grad"]
    assert [port.name for port in g.inputs] == ["x", "y"]
    assert set(g.parameters) == {"w", "b"}
    shapes = {port.name: port.shape for port in g.outputs}
    assert shapes["w.grad"] == (3, 2)
    assert shapes["x.grad"] == ("batch", 3)
    check_model(g.ir)


def test_gradient_equals_pytorch() -> None:
    m = model(REGRESSION)
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((5, 3)), rng.standard_normal((5, 2))
    found = run(autodiff.gradient(m, of="loss", wrt=["x", "w", "b", "square"]), x=x, y=y)
    tx = torch.tensor(x, requires_grad=True)
    w, b = (torch.tensor(m.parameters[name], requires_grad=True) for name in ("w", "b"))
    loss = ((tx @ w + b - torch.tensor(y)) ** 2).mean()
    loss.backward()
    np.testing.assert_allclose(found["loss"], loss.item(), rtol=1e-12)
    for name, tensor in (("x", tx), ("w", w), ("b", b)):
        assert tensor.grad is not None
        np.testing.assert_allclose(found[f"{name}.grad"], tensor.grad.numpy(), rtol=1e-12)
    np.testing.assert_allclose(found["square.grad"], np.full((5, 2), 0.1), rtol=1e-12)


def test_vjp_takes_cotangents() -> None:
    m = model(REGRESSION)
    v = autodiff.vjp(m, of=["z", "loss"], wrt=["x"])
    assert [port.name for port in v.inputs] == ["x", "y", "z.cotangent", "loss.cotangent"]
    assert v.inputs[2].shape == ("batch", 2)
    rng = np.random.default_rng(1)
    x, y, c = rng.standard_normal((4, 3)), rng.standard_normal((4, 2)), rng.standard_normal((4, 2))
    found = run(v, x=x, y=y, **{"z.cotangent": c, "loss.cotangent": 3.0})
    tx = torch.tensor(x, requires_grad=True)
    z = tx @ torch.tensor(m.parameters["w"]) + torch.tensor(m.parameters["b"])
    total = (z * torch.tensor(c)).sum() + 3.0 * ((z - torch.tensor(y)) ** 2).mean()
    (expected,) = torch.autograd.grad(total, tx)
    np.testing.assert_allclose(found["x.grad"], expected.numpy(), rtol=1e-12)


def test_a_value_used_several_times_gets_the_sum() -> None:
    m = model("""agraph (double[n] x) => (double s) {
        e = Exp (x)  a = Mul (e, x)  b = Div (a, e)  c = Add (b, e)  s = ReduceSum <keepdims = 0> (c)
    }""")
    x = np.array([0.5, -1.0, 2.0])
    found = run(autodiff.gradient(m, of="s", wrt=["x"]), x=x)["x.grad"]
    np.testing.assert_allclose(found, 1 + np.exp(x), rtol=1e-12)


def test_equal_gradients_of_two_inputs_are_two_outputs() -> None:
    m = model("agraph (double[n] a, double[n] b) => (double s) { c = Add (a, b) s = ReduceSum <keepdims = 0> (c) }")
    found = run(autodiff.gradient(m, of="s", wrt=["a", "b", "c"]), a=np.ones(2), b=np.ones(2))
    assert list(found) == ["s", "a.grad", "b.grad", "c.grad"]
    assert all(found[f"{name}.grad"].tolist() == [1.0, 1.0] for name in "abc")


def test_gradient_of_itself_is_one() -> None:
    m = model("agraph (double[1] x) => (double[1] y) { y = Exp (x) }")
    found = run(autodiff.gradient(m, of="y", wrt=["y", "x"]), x=[0.5])
    assert found["y.grad"].tolist() == [1.0]
    np.testing.assert_allclose(found["x.grad"], np.exp([0.5]))


def test_second_derivatives_compose() -> None:
    m = model("""agraph (double[n, 3] x, double[3, 3] w) => (double s) {
        p = MatMul (x, w)  q = Softmax <axis = 1> (p)  l = Log (q)  m = Mul (q, l)  r = Sqrt (q)  d = Div (m, r)
        t = Transpose <perm = [1, 0]> (d)  s = ReduceMean <keepdims = 0> (t)
    }""")
    g = autodiff.gradient(m, of="s", wrt=["x"])
    op = Builder(g.ir.graph)
    slope = next(value for value in g.ir.graph.outputs if value.name == "x.grad")
    op.name_output(op.ReduceSum(op.Mul(slope, slope), keepdims=0), "penalty")
    gg = autodiff.gradient(g, of="penalty", wrt=["x", "w"])
    assert [port.name for port in gg.outputs] == ["s", "x.grad", "penalty", "x.grad.grad", "w.grad"]
    check_model(gg.ir)
    rng = np.random.default_rng(2)
    x, w = rng.standard_normal((4, 3)), rng.standard_normal((3, 3))
    tx, tw = torch.tensor(x, requires_grad=True), torch.tensor(w, requires_grad=True)
    q = torch.softmax(tx @ tw, 1)
    s = (q * q.log() / q.sqrt()).mean()
    (first,) = torch.autograd.grad(s, tx, create_graph=True)
    expected = torch.autograd.grad((first**2).sum(), [tx, tw])
    found = run(gg, x=x, w=w)
    np.testing.assert_allclose(found["x.grad.grad"], expected[0].numpy(), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(found["w.grad"], expected[1].numpy(), rtol=1e-9, atol=1e-12)


@settings(max_examples=15, derandomize=True, database=None)
@given(shape=st.lists(st.integers(1, 4), max_size=3), free=st.booleans())
def test_what_the_target_does_not_depend_on_has_zeros(shape: list[int], free: bool) -> None:
    declared = [f"d{i}" if free else n for i, n in enumerate(shape)]
    inputs = [
        helper.make_tensor_value_info("x", TensorProto.DOUBLE, [2]),
        helper.make_tensor_value_info("other", TensorProto.DOUBLE, declared),
    ]
    nodes = [
        helper.make_node("ReduceSum", ["x"], ["s"], keepdims=0),
        helper.make_node("Exp", ["other"], ["unrelated"]),
        # Its shape is read, its content is not: no dependence either.
        helper.make_node("Shape", ["other"], ["shape"]),
    ]
    outputs = [
        helper.make_tensor_value_info("s", TensorProto.DOUBLE, []),
        helper.make_tensor_value_info("unrelated", TensorProto.DOUBLE, declared),
        helper.make_tensor_value_info("shape", TensorProto.INT64, [len(shape)]),
    ]
    graph = helper.make_graph(nodes, "g", inputs, outputs)
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    g = autodiff.gradient(Model.from_proto(proto), of="s", wrt=["other", "unrelated", "x"])
    found = run(g, x=np.ones(2), other=np.ones(shape))
    for name in ("other.grad", "unrelated.grad"):
        assert found[name].shape == tuple(shape)
        assert found[name].dtype == np.float64
        assert not found[name].any()
    assert found["x.grad"].tolist() == [1.0, 1.0]


def test_an_inner_value_gives_way_to_a_gradients_name() -> None:
    m = model("agraph (double[2] x) => (double s) { h = Exp (x) s = ReduceSum <keepdims = 0> (h) }")
    m.ir.graph.node(0).outputs[0].name = "x.grad"
    found = run(autodiff.gradient(m, of="s", wrt=["x"]), x=np.zeros(2))
    assert found["x.grad"].tolist() == [1.0, 1.0]


def test_weights_that_are_zero_stay() -> None:
    m = model("""agraph (double[n, 3] x) => (double[n, 3] y, double s) <double[3] b = {0, 0, 0}> {
        e = Exp (x)  z = Add (e, b)  y = Sin (z)  s = ReduceSum <keepdims = 0> (y)
    }""")
    assert set(autodiff.gradient(m, of="s", wrt=["x"]).parameters) == {"b"}


def test_the_model_is_left_as_it_was() -> None:
    m = model(REGRESSION)
    before = m.to_bytes()
    autodiff.gradient(m, of="loss", wrt=["w"])
    assert m.to_bytes() == before


def test_maximum_shared_by_several_elements() -> None:
    """Against amax, which shares the gradient equally among equal elements."""
    rng = np.random.default_rng(3)
    x = rng.integers(0, 2, (2, 3, 6, 7)).astype(np.float64)
    for kernel, stride in (((2, 3), (2, 3)), ((3, 2), (1, 2))):
        m = model(f"""agraph (double[n, 3, 6, 7] x) => (double s) {{
            y = MaxPool <kernel_shape = [{kernel[0]}, {kernel[1]}], strides = [{stride[0]}, {stride[1]}]> (x)
            e = Exp (y)  s = ReduceSum <keepdims = 0> (e)
        }}""")
        tx = torch.tensor(x, requires_grad=True)
        windows = tx.unfold(2, kernel[0], stride[0]).unfold(3, kernel[1], stride[1])
        (expected,) = torch.autograd.grad(windows.amax((4, 5)).exp().sum(), tx)
        found = run(autodiff.gradient(m, of="s", wrt=["x"]), x=x)["x.grad"]
        np.testing.assert_allclose(found, expected.numpy(), rtol=1e-12)


INTEGER = """agraph (double[n] x, int64[n] k) => (double s, int64[n] i) {
    i = Cast <to = 7> (x)  j = Add (i, k)  f = Cast <to = 11> (j)  s = ReduceSum <keepdims = 0> (f)
}"""

ERRORS = {
    "several elements": (
        AutodiffError,
        REGRESSION,
        {"of": "z", "wrt": ["x"]},
        r"of='z' has shape \['batch', 2\], a gradient needs one element.*vjp\(model, of=\['z'\]",
    ),
    "unknown of": (
        AutodiffError,
        REGRESSION,
        {"of": "los", "wrt": ["x"]},
        "of: the model has no value 'los'; it has:.*loss",
    ),
    "unknown wrt": (AutodiffError, REGRESSION, {"wrt": ["v"]}, "wrt: the model has no value 'v'; it has: x, y, w, b"),
    "empty": (AutodiffError, REGRESSION, {"wrt": []}, "wrt is empty"),
    "twice": (AutodiffError, REGRESSION, {"wrt": ["x", "x"]}, "wrt names x twice"),
    "integer wrt": (
        NotDifferentiableError,
        INTEGER,
        {"of": "s", "wrt": ["k"]},
        "wrt: 'k' is int64; only floating-point values have gradients",
    ),
    "integer of": (NotDifferentiableError, INTEGER, {"of": "i", "wrt": ["x"]}, "of: 'i' is int64"),
    "only through integers": (
        NotDifferentiableError,
        INTEGER,
        {"of": "s", "wrt": ["x"]},
        r"with respect to 'x' does not exist.*only through Cast '.*'.*leave 'x' out of wrt",
    ),
    "no rule": (
        MissingRuleError,
        "agraph (double[n] x) => (double loss) { y = Hardmax (x) loss = ReduceSum <keepdims = 0> (y) }",
        {"wrt": ["x"]},
        r"no gradient rule for Hardmax \(node '.+'\); train only .*, or register a rule with "
        r"@autodiff.rule\('', 'Hardmax'\)",
    ),
    "sequences": (
        MissingRuleError,
        """agraph (double[n] x) => (double loss) {
            list = SequenceConstruct (x, x)
            y = ConcatFromSequence <axis = 0> (list)
            loss = ReduceSum <keepdims = 0> (y)
        }""",
        {"wrt": ["x"]},
        r"no gradient passes through ConcatFromSequence \(node '.+'\): what a sequence holds .*; export the model ",
    ),
    "refused attribute": (
        MissingRuleError,
        """agraph (double[2, 3] x, int64[1] axes) => (double[k] y, double loss) {
            y = ReduceSum <keepdims = 0> (x, axes)
            loss = ReduceSum <keepdims = 0> (y)
        }""",
        {"wrt": ["x"]},
        r"ReduceSum '.+': keepdims=0: with axes that are computed at run time, .*rules/reduce.py",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors_say_what_to_do(case: str) -> None:
    error, text, arguments, message = ERRORS[case]
    with pytest.raises(error, match=re.compile(message, re.DOTALL)):
        autodiff.gradient(model(text), **arguments)


def test_vjp_of_nothing() -> None:
    with pytest.raises(AutodiffError, match="of is empty"):
        autodiff.vjp(model(REGRESSION), of=[], wrt=["x"])


def test_names_are_strings() -> None:
    model = Model.from_proto(
        onnx.parser.parse_model(
            '<ir_version: 10, opset_import: ["" : 21]> agraph (float x) => (float y) { y = Exp (x) }'
        )
    )
    with pytest.raises(AutodiffError, match=r"of=\['y'\]: gradient takes the name of one value"):
        autodiff.gradient(model, of=["y"], wrt=["x"])  # type: ignore[arg-type]
    with pytest.raises(AutodiffError, match="wrt holds 0; expected names"):
        autodiff.gradient(model, of="y", wrt=[0])  # type: ignore[list-item]
