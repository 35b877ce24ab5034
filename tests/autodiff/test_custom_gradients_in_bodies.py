"""Markers and rules for one call in the bodies of Loop, Scan and If, against the same steps in PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from gradient_cases.marker_reference import Limited, Straight

from archipel import Model, autodiff
from archipel.graph import check_model
from archipel.training import losses, optimizers, step_graph

STEP = "p = MatMul (a, w)  [bend] t = Tanh (p)  f = Mul (p, four)  r = Round (f)  q = Mul (r, t)  b = Add (q, a)"
LOOP = f"""Loop (k, , x) <body = step (int64 i, bool go_in, double[n, 3] a) => (bool go, double[n, 3] b) {{
    go = Identity (go_in)  {STEP}
}}>"""
NESTS = {
    "Loop": f"y = {LOOP}",
    "Scan": f"""y, all = Scan <num_scan_inputs = 1, body = step (double[n, 3] a, double[3] item) =>
        (double[n, 3] b, double[n, 3] kept) {{ {STEP}  kept = Mul (b, item) }}> (x, items)""",
    "Loop in If": f"""y = If (yes) <then_branch = then () => (double[n, 3] out) {{ out = {LOOP} }},
        else_branch = otherwise () => (double[n, 3] same) {{ same = Identity (x) }}>""",
}
X = np.array([[0.3, -0.9, 0.8], [0.7, 0.2, -0.6]])
V = {"x": np.array([[0.5, -0.2, 0.1], [0.3, 0.9, -1.0]]), "w": np.array([[1, -1, 0.5], [0, 0.3, -0.7], [0.2, 0.4, 0]])}


def load(nest: str) -> Model:
    """Three steps, whichever way they are repeated, and a Tanh behind them that the body's rules leave alone."""
    text = f"""<ir_version: 10, opset_import: ["" : 21]> agraph (double[n, 3] x) => (double[n, 3] y, double loss)
        <double[3, 3] w = {{0.35, -0.5, 0.2, 0.45, 0.5, -0.3, 0.2, 0.25, -0.5}}, int64 k = {{3}}, double four = {{4}},
         double[3, 3] items = {{1, 1, 1, 1, 1, 1, 1, 1, 1}}, bool yes = {{1}}>
        {{ {NESTS[nest]}  flat = Div (y, four)  [end] z = Tanh (flat)
            zz = Mul (z, z)  loss = ReduceSum <keepdims = 0> (zz) }}"""
    return Model.from_proto(onnx.parser.parse_model(text))


def run(m: Model, feed: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    check_model(m.ir)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(m.to_bytes(), options, providers=["CPUExecutionProvider"])
    names = [port.name for port in m.outputs]
    return dict(zip(names, session.run(names, {port.name: feed[port.name] for port in m.inputs})))


Marks = dict[str, Callable[[torch.Tensor], torch.Tensor]]


def reference(marks: Marks, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    def mark(name: str, v: torch.Tensor) -> torch.Tensor:
        return marks[name](v) if name in marks else v

    a = x
    for _ in range(3):
        a = mark("a", a)
        p = mark("p", a @ w)
        t = mark("t", marks.get("bend", torch.tanh)(p))
        a = marks.get("round", torch.round)(p * 4.0) * t + a
    return (marks.get("end", torch.tanh)(a / 4.0) ** 2).sum()


class Cubed(torch.autograd.Function):
    """Tanh, with x^3 for its derivative."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return torch.tanh(x)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, g: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return g * x**3


def cube(ctx: autodiff.RuleContext) -> list[ir.Value | None]:
    x = ctx.input(0)
    return [ctx.op.Mul(ctx.cotangent, ctx.op.Mul(x, ctx.op.Mul(x, x)))]


CASES: dict[str, tuple[Callable[[Model], Model], autodiff.Overrides | None, Marks]] = {
    "stop": (lambda m: autodiff.stop_gradient(m, ["t"]), None, {"t": torch.detach}),
    "straight": (lambda m: autodiff.straight_through(m, ["r"]), None, {"round": Straight.apply}),
    "clip by value": (
        lambda m: autodiff.clip_gradient(m, ["p"], 0.625),
        None,
        {"p": lambda v: Limited.apply(v, 0.625, "value")},
    ),
    "clip a state by norm": (
        lambda m: autodiff.clip_gradient(m, ["a"], 0.625, by="norm"),
        None,
        {"a": lambda v: Limited.apply(v, 0.625, "norm")},
    ),
    "rule of a node": (lambda m: m, {"bend": cube}, {"bend": Cubed.apply}),
    "rule of an operator": (lambda m: m, {("", "Tanh"): cube}, {"bend": Cubed.apply, "end": Cubed.apply}),
    "both": (
        lambda m: autodiff.stop_gradient(autodiff.straight_through(m, ["r"]), ["t"]),
        {"end": cube},
        {"round": Straight.apply, "t": torch.detach, "end": Cubed.apply},
    ),
}


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize("nest", NESTS)
@pytest.mark.parametrize("case", CASES)
def test_derivatives_equal_pytorch(case: str, nest: str, tmp_path: Path) -> None:
    change, rules, marks = CASES[case]
    change(load(nest)).save(tmp_path / "marked.onnx")
    m = Model.from_onnx(tmp_path / "marked.onnx")
    np.testing.assert_array_equal(run(m, {"x": X})["loss"], run(load(nest), {"x": X})["loss"])

    tensors = [torch.tensor(X, requires_grad=True), torch.tensor(m.parameters["w"], requires_grad=True)]
    first = torch.autograd.grad(reference(marks, *tensors), tensors, create_graph=True)
    inner = sum((g * torch.from_numpy(V[name])).sum() for g, name in zip(first, "xw"))
    second = torch.autograd.grad(inner, tensors)
    feed = {"x": X} | {f"{name}.tangent": v for name, v in V.items()}
    once = autodiff.gradient(m, wrt=["x", "w"], rules=rules)
    found = run(once, {"x": X})
    for name, slope in zip("xw", first):
        np.testing.assert_allclose(found[f"{name}.grad"], slope.detach().numpy(), rtol=1e-9, atol=1e-11)
    if "clip" in case and nest == "Loop in If":
        return  # the gradient runs the loop again, and second derivatives limit each run's part on its own
    found = run(autodiff.hessian_vector(m, wrt=["x", "w"], rules=rules), feed)
    for name, product in zip("xw", second):
        np.testing.assert_allclose(found[f"{name}.hvp"], product.numpy(), rtol=1e-8, atol=1e-10)
    if "clip" not in case:  # tangents are not clipped
        pushed = run(autodiff.jvp(m, of=["loss"], wrt=["x", "w"], rules=rules), feed)
        np.testing.assert_allclose(pushed["loss.tangent"], inner.item(), rtol=1e-9)
    if rules is None:  # a mark counts in the gradient of a gradient, a rule for one call does not
        twice = autodiff.vjp(once, of=["x.grad", "w.grad"], wrt=["x", "w"])
        pulled = run(twice, {"x": X} | {f"{name}.grad.cotangent": v for name, v in V.items()})
        for name, product in zip("xw", second):
            np.testing.assert_allclose(pulled[f"{name}.grad.grad"], product.numpy(), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("nest", NESTS)
@pytest.mark.sampled(every=4)
def test_tangents_are_not_clipped(nest: str) -> None:
    feed = {"x": X, "x.tangent": V["x"]}
    plain = run(autodiff.jvp(load(nest), of=["loss"], wrt=["x"]), feed)["loss.tangent"]
    for by in ("value", "norm"):
        clipped = autodiff.clip_gradient(load(nest), ["p", "a"], 0.01, by=by)
        found = run(autodiff.jvp(clipped, of=["loss"], wrt=["x"]), feed)["loss.tangent"]
        np.testing.assert_allclose(found, plain, rtol=1e-12)


def test_a_gradient_forgets_the_rules() -> None:
    once = autodiff.gradient(load("Loop"), wrt=["x"], rules={"bend": cube})
    assert not any(node.meta for node in once.ir.graph.all_nodes())


def test_steps_have_no_marks() -> None:
    m = autodiff.clip_gradient(load("Loop in If"), ["p"], 0.625)
    step = step_graph(m, losses.mse(), optimizers.sgd())
    assert {node.domain for node in step.ir.graph.all_nodes()} == {""}
