"""Gradients of one's own for parts of a model: stopped, clipped, straight through, by a rule for one call."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from gradient_cases.marker_reference import Limited, Straight
from gradient_cases.reference import evaluator

from archipel import Model, autodiff
from archipel.errors import AutodiffError, NotDifferentiableError
from archipel.graph import check_model
from archipel.graph.functions import KEPT
from archipel.training import losses, optimizers, step_graph

TEXT = """<ir_version: 10, opset_import: ["" : 21]>
agraph (real[n, 3] x) => (real[n, 2] y, real loss) <real[3, 2] w = {0.7, -1.2, 0.4, 0.9, 1.1, -0.3}> {
    h = MatMul (x, w)  r = Round (h)  q = Mul (r, h)  y = Tanh (q)  yy = Mul (y, h)
    loss = ReduceSum <keepdims = 0> (yy)
}"""
X = np.array([[0.3, -1.4, 0.8], [1.7, 0.2, -0.6]])
V = np.array([[0.5, -0.2, 0.1], [0.3, 0.9, -1.0]])


def load(dtype: str = "double") -> Model:
    return Model.from_proto(onnx.parser.parse_model(TEXT.replace("real", dtype)))


def run(m: Model, feed: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    check_model(m.ir)
    names = [port.name for port in m.outputs]
    return dict(zip(names, evaluator(m.to_bytes()).run(names, feed)))


def same(v: torch.Tensor) -> torch.Tensor:
    return v


CASES: dict[str, tuple[Callable[[Model], Model], dict[str, Callable]]] = {
    "rounding has no gradient": (lambda m: m, {}),
    "stop": (lambda m: autodiff.stop_gradient(m, ["q"]), {"q": torch.Tensor.detach}),
    "stop several": (lambda m: autodiff.stop_gradient(m, ["y", "w"]), {"y": torch.Tensor.detach, "w": torch.detach}),
    "stop an input": (lambda m: autodiff.stop_gradient(m, ["x"]), {"x": torch.Tensor.detach}),
    "straight through": (lambda m: autodiff.straight_through(m, ["r"]), {"round": Straight.apply}),
    "straight through to a name": (
        lambda m: autodiff.straight_through(m, {"r": "h"}),
        {"round": Straight.apply},
    ),
    "clip by value": (
        lambda m: autodiff.clip_gradient(m, ["h"], 0.625),
        {"h": lambda v: Limited.apply(v, 0.625, "value")},
    ),
    "clip by norm": (
        lambda m: autodiff.clip_gradient(m, ["h"], 0.625, by="norm"),
        {"h": lambda v: Limited.apply(v, 0.625, "norm")},
    ),
    "a norm within the limit": (
        lambda m: autodiff.clip_gradient(m, ["h"], 60.0, by="norm"),
        {"h": lambda v: Limited.apply(v, 60.0, "norm")},
    ),
    "both": (
        lambda m: autodiff.clip_gradient(autodiff.straight_through(m, ["r"]), ["w"], 0.25),
        {"round": Straight.apply, "w": lambda v: Limited.apply(v, 0.25, "value")},
    ),
}


def reference(marks: dict[str, Callable], x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    x, w = marks.get("x", same)(x), marks.get("w", same)(w)
    h = marks.get("h", same)(x @ w)
    q = marks.get("q", same)(marks.get("round", torch.round)(h) * h)
    y = marks.get("y", same)(torch.tanh(q))
    return (y * h).sum()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.sampled(every=8)
def test_first_and_second_derivatives_equal_pytorch(case: str, tmp_path: Path) -> None:
    change, marks = CASES[case]
    plain = load()
    marked = change(plain)
    assert marked.parameter_names == plain.parameter_names
    for name, value in run(plain, {"x": X}).items():
        np.testing.assert_array_equal(run(marked, {"x": X})[name], value)

    tensors = [torch.from_numpy(X).requires_grad_(), torch.from_numpy(plain.parameters["w"]).requires_grad_()]
    first = torch.autograd.grad(reference(marks, *tensors), tensors, create_graph=True, allow_unused=True)
    first = tuple(torch.zeros_like(t) if g is None else g for g, t in zip(first, tensors))
    marked.save(tmp_path / "marked.onnx")
    for m in (marked, Model.from_onnx(tmp_path / "marked.onnx")):
        once = autodiff.gradient(m, of="loss", wrt=["x", "w"])
        found = run(once, {"x": X})
        for name, expected in zip(("x", "w"), first):
            np.testing.assert_allclose(found[f"{name}.grad"], expected.detach().numpy(), rtol=1e-9, atol=1e-12)

    inner = sum((g * torch.from_numpy(v)).sum() for g, v in zip(first, (V, V.T[:, :2].copy())))
    second = torch.autograd.grad(inner, tensors, allow_unused=True) if inner.requires_grad else (None, None)
    feed = {"x": X, "x.tangent": V, "w.tangent": V.T[:, :2].copy()}
    curved = run(autodiff.hessian_vector(marked, wrt=["x", "w"]), feed)
    twice = autodiff.vjp(once, of=["x.grad", "w.grad"], wrt=["x", "w"])
    pulled = run(twice, {"x": X, "x.grad.cotangent": V, "w.grad.cotangent": V.T[:, :2].copy()})
    for name, product, tensor in zip(("x", "w"), second, tensors):
        expected = np.zeros(tensor.shape) if product is None else product.numpy()
        np.testing.assert_allclose(pulled[f"{name}.grad.grad"], expected, rtol=1e-8, atol=1e-11)
        np.testing.assert_allclose(curved[f"{name}.hvp"], expected, rtol=1e-8, atol=1e-11)


def test_forward_mode_sees_markers_and_does_not_clip() -> None:
    def tangent(m: Model) -> np.ndarray:
        return run(autodiff.jvp(m, of=["loss"], wrt=["x"]), {"x": X, "x.tangent": V})["loss.tangent"]

    def expected(marks: dict[str, Callable]) -> float:
        x = torch.from_numpy(X).requires_grad_()
        (g,) = torch.autograd.grad(reference(marks, x, torch.from_numpy(load().parameters["w"])), [x])
        return float((g * torch.from_numpy(V)).sum())

    m = load()
    np.testing.assert_allclose(tangent(autodiff.stop_gradient(m, ["q"])), expected({"q": torch.detach}), rtol=1e-9)
    straight = autodiff.straight_through(m, ["r"])
    np.testing.assert_allclose(tangent(straight), expected({"round": Straight.apply}), rtol=1e-9)
    for by in ("value", "norm"):
        np.testing.assert_allclose(tangent(autodiff.clip_gradient(m, ["h"], 0.01, by=by)), tangent(m), rtol=1e-12)


def test_runtimes_inline_the_markers_and_steps_have_none() -> None:
    m = autodiff.clip_gradient(autodiff.straight_through(load("float"), ["r"]), ["w"], 0.25)
    once = autodiff.gradient(m, wrt=["w"])
    assert {node.domain for node in once.ir.graph} == {"", "archipel.gradient"}
    session = onnxruntime.InferenceSession(once.to_bytes(), providers=["CPUExecutionProvider"])
    (found,) = session.run(["w.grad"], {"x": X.astype(np.float32)})
    assert np.abs(found).max() == np.float32(0.25)
    step = step_graph(m, losses.mse(), optimizers.sgd())
    assert {node.domain for node in step.ir.graph} == {""}
    w = m.parameters["w"]
    session = onnxruntime.InferenceSession(step.to_bytes(), providers=["CPUExecutionProvider"])
    feed = {"x": X.astype(np.float32), "label": np.full((2, 2), 9, np.float32), "w": w, "lr": np.array(2, np.float32)}
    (after,) = session.run(["w.next"], feed)
    np.testing.assert_allclose(np.abs(after - w).max(), 0.5, rtol=1e-5)


def test_what_a_gradient_passes_by_is_a_constant() -> None:
    m = Model.from_proto(
        onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 21]>
    agraph (double[n] x, double[n] s) => (double[n] y) { t = Div (x, s)  r = Round (t)  y = Mul (r, s) }""")
    )
    straight = autodiff.straight_through(m, {"y": "x"})
    feed = {"x": np.array([0.7, -3.1]), "s": np.array([0.5, 2.0]), "y.cotangent": np.array([1.0, 4.0])}
    found = run(autodiff.vjp(straight, of=["y"], wrt=["x", "s"]), feed)
    assert found["x.grad"].tolist() == [1.0, 4.0]
    assert found["s.grad"].tolist() == [0.0, 0.0]


def test_every_lane_has_its_own_norm() -> None:
    m = autodiff.clip_gradient(load(), ["x"], 0.5, by="norm")
    for order in (
        autodiff.vmap(autodiff.gradient(m, wrt=["x"]), over=["x"], size=2),
        autodiff.vmap(autodiff.gradient(autodiff.straight_through(m, ["r"]), wrt=["x"]), over=["x"], size=2),
    ):
        found = run(order, {"x": np.stack([X, 2 * X])})["x.grad"]
        np.testing.assert_allclose(np.linalg.norm(found, axis=(1, 2)), [0.5, 0.5], rtol=1e-9)


def cube(ctx: autodiff.RuleContext) -> list[ir.Value | None]:
    x = ctx.input(0)
    return [ctx.op.Mul(ctx.cotangent, ctx.op.Mul(x, ctx.op.Mul(x, x)))]


def test_a_rule_for_one_call() -> None:
    """d loss / d h through y = Tanh(q) with q^3 for the derivative of Tanh, of one node or of every Tanh."""
    m = Model.from_proto(
        onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 21]>
    agraph (double[n] x) => (double s) {
        [first] a = Tanh (x) [second] b = Tanh (a) s = ReduceSum <keepdims = 0> (b)
    }""")
    )
    x = np.array([0.3, -0.8])
    a = np.tanh(x)
    for key, expected in (
        ("second", a**3 * (1 - a**2)),
        ("first", (1 - np.tanh(a) ** 2) * x**3),
        (("", "Tanh"), a**3 * x**3),
    ):
        found = run(autodiff.gradient(m, of="s", wrt=["x"], rules={key: cube}), {"x": x})["x.grad"]
        np.testing.assert_allclose(found, expected, rtol=1e-12)
        pulled = autodiff.vjp(m, of=["b"], wrt=["x"], rules={key: cube})
        np.testing.assert_allclose(run(pulled, {"x": x, "b.cotangent": np.ones(2)})["x.grad"], expected, rtol=1e-12)
        pushed = autodiff.jvp(m, of=["b"], wrt=["x"], rules={key: cube})
        found = run(pushed, {"x": x, "x.tangent": np.ones(2)})["b.tangent"]
        np.testing.assert_allclose(found, expected, rtol=1e-12)
    both = {("", "Tanh"): cube, "first": lambda ctx: [ctx.cotangent]}
    found = run(autodiff.gradient(m, of="s", wrt=["x"], rules=both), {"x": x})["x.grad"]
    np.testing.assert_allclose(found, a**3, rtol=1e-12)
    # g = a^3 x^3, whose derivative again takes x^3 for that of a.
    found = run(autodiff.hessian_vector(m, of="s", wrt=["x"], rules={("", "Tanh"): cube}),
                {"x": x, "x.tangent": np.ones(2)})["x.hvp"]  # fmt: skip
    np.testing.assert_allclose(found, 3 * a**2 * x**6 + 3 * a**3 * x**2, rtol=1e-12)
    _, linear = autodiff.linearize(m, of=["b"], wrt=["x"], rules={"second": cube})
    assert "Tanh" not in {node.op_type for node in linear.ir.graph}
    plain = run(autodiff.gradient(m, of="s", wrt=["x"]), {"x": x})["x.grad"]  # that call alone
    np.testing.assert_allclose(plain, (1 - np.tanh(a) ** 2) * (1 - a**2), rtol=1e-12)


def test_a_rule_for_one_call_counts_before_one_of_forward_mode() -> None:
    m = Model.from_proto(
        onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 21]>
    agraph (double[n] x) => (double[n] y) { y = Mul (x, x) }""")
    )
    assert ("", "Mul") in autodiff.FORWARD
    pushed = autodiff.jvp(m, of=["y"], wrt=["x"], rules={("", "Mul"): lambda ctx: [ctx.cotangent, None]})
    moved = np.array([2.0, -1.0])
    found = run(pushed, {"x": np.array([5.0, 7.0]), "x.tangent": moved})["y.tangent"]
    np.testing.assert_array_equal(found, moved)


FUNCTION = """<ir_version: 10, opset_import: ["" : 21, "test.custom" : 1]>
agraph (double[n] x) => (double s) { y = test.custom.Doubled (x) s = ReduceSum <keepdims = 0> (y) }
<opset_import: ["" : 21], domain: "test.custom">
Doubled (a) => (b) { b = Add (a, a) }"""


def test_a_function_has_another_rule_for_one_call() -> None:
    key, x = ("test.custom", "Doubled"), np.array([0.5, 2.0])
    rules = {key: cube}
    inlined = Model.from_proto(onnx.parser.parse_model(FUNCTION))
    message = (
        r"^rules: the function test\.custom::Doubled was inlined .*; call autodiff\.keep_function\('test\.custom', "
    )
    with pytest.raises(AutodiffError, match=message):
        autodiff.gradient(inlined, of="s", wrt=["x"], rules=rules)
    try:
        autodiff.keep_function(*key)
        m = Model.from_proto(onnx.parser.parse_model(FUNCTION))
        made = autodiff.gradient(m, of="s", wrt=["x"], rules=rules)
        assert {node.domain for node in made.ir.graph} == {""}
        np.testing.assert_allclose(run(made, {"x": x})["x.grad"], x**3)
        np.testing.assert_allclose(run(autodiff.gradient(m, of="s", wrt=["x"]), {"x": x})["x.grad"], [2.0, 2.0])
    finally:
        KEPT.discard(key)


INTEGERS = '<ir_version: 10, opset_import: ["" : 21]> agraph (int32[n] x) => (int32[n] y) { y = Neg (x) }'

ERRORS: dict[str, tuple[Callable[[Model], object], type[Exception], str]] = {
    "unknown name": (lambda m: autodiff.stop_gradient(m, ["z"]), AutodiffError, "names: the model has no value 'z'"),
    "no name": (lambda m: autodiff.stop_gradient(m, []), AutodiffError, "names is empty"),
    "integers": (
        lambda m: autodiff.clip_gradient(Model.from_proto(onnx.parser.parse_model(INTEGERS)), ["x"], 1.0),
        NotDifferentiableError,
        "names: 'x' is int32",
    ),
    "limit": (lambda m: autodiff.clip_gradient(m, ["h"], 0), AutodiffError, "limit=0; expected a number above 0"),
    "by": (lambda m: autodiff.clip_gradient(m, ["h"], 1, by="l2"), AutodiffError, "by='l2'; expected 'value' or"),  # type: ignore[arg-type]
    "several inputs": (
        lambda m: autodiff.straight_through(m, ["q"]),
        AutodiffError,
        "names: the gradient of 'q': Mul 'node_2' has several inputs of its shape; say where it goes, as in {'q': ",
    ),
    "an input": (lambda m: autodiff.straight_through(m, ["x"]), AutodiffError, "of 'x' cannot pass straight through"),
    "another shape": (
        lambda m: autodiff.straight_through(m, {"y": "x"}),
        AutodiffError,
        "of 'y' cannot go to 'x': that is DOUBLE['n', 3], the value DOUBLE['n', 2]",
    ),
    "no way": (lambda m: autodiff.straight_through(m, {"h": "y"}), AutodiffError, "'y', which it does not depend on"),
    "rule of no node": (
        lambda m: autodiff.gradient(m, wrt=["x"], rules={"z": cube}),
        AutodiffError,
        "rules: the model has no node named 'z'; its first ones are: node, node_1, ",
    ),
    "rule of no operator": (
        lambda m: autodiff.gradient(m, wrt=["x"], rules={("", "Relu"): cube}),
        AutodiffError,
        "rules: the model has no node of ('', 'Relu')",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors_say_what_to_do(case: str) -> None:
    call, error, message = ERRORS[case]
    with pytest.raises(error, match=re.escape(message)) as caught:
        call(load())
    assert "\n" not in str(caught.value)
