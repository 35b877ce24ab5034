"""Model-local functions: a rule of one's own is used instead of the body, and afterwards standard operators remain."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

from archipel import Model, autodiff
from archipel.autodiff import RULES, RuleContext
from archipel.errors import AutodiffError, ModelImportError
from archipel.graph import check_model
from archipel.graph.functions import KEPT

ROUNDED = """<ir_version: 10, opset_import: ["" : {opset}, "test.functions" : 1]>
agraph (float[n, 2] x) => (float[n, 2] y, float loss) <float[2, 2] w = {{1, -2, 0.5, 3}}>
{{
    p = MatMul (x, w)
    y = test.functions.Rounded <scale = 2.0> (p)
    loss = ReduceSum <keepdims = 0> (y)
}}
<opset_import: ["" : {body}], domain: "test.functions">
Rounded <scale: float> (a) => (b)
{{
    s = Constant <value_float: float = @scale> ()
    c = Mul (a, s)
    r = Round (c)
    b = Div (r, s)
}}"""


def load(opset: int = 21, body: int = 21) -> Model:
    return Model.from_proto(onnx.parser.parse_model(ROUNDED.format(opset=opset, body=body)))


def run(model: Model, **inputs: np.ndarray) -> dict[str, np.ndarray]:
    session = onnxruntime.InferenceSession(model.to_bytes(), providers=["CPUExecutionProvider"])
    names = [port.name for port in model.outputs]
    return dict(zip(names, session.run(names, {name: np.asarray(v, np.float32) for name, v in inputs.items()})))


def straight_through(ctx: RuleContext) -> list[ir.Value | None]:
    assert ctx.attribute("scale", None) == 2.0
    return [ctx.cotangent]


@pytest.fixture
def register() -> Iterator[Callable]:
    yield lambda: autodiff.rule("test.functions", "Rounded")(straight_through)
    RULES.pop(("test.functions", "Rounded"), None)
    KEPT.discard(("test.functions", "Rounded"))


X = np.array([[0.3, 1.1], [-0.4, 0.9], [2.0, 0.2]], np.float32)
W = np.array([[1, -2], [0.5, 3]], np.float32)


@pytest.mark.parametrize(("opset", "body"), [(21, 21), (21, 18), (17, 17), (25, 25), (22, 20)])
def test_rule_of_a_function_is_used_and_nothing_of_it_remains(register: Callable, opset: int, body: int) -> None:
    register()
    model = load(opset, body)
    assert [node.op_type for node in model.ir.graph if node.domain] == ["Rounded"]
    g = autodiff.gradient(model, of="loss", wrt=["x", "w"])
    check_model(g.ir)
    assert not g.ir.functions
    found = run(g, x=X)
    np.testing.assert_allclose(found["y"], np.round(X @ W * 2) / 2, rtol=1e-6)
    np.testing.assert_allclose(found["x.grad"], np.ones((3, 2), np.float32) @ W.T, rtol=1e-6)
    np.testing.assert_allclose(found["w.grad"], X.T @ np.ones((3, 2), np.float32), rtol=1e-6)
    # The model itself still has its function, and runs as it is.
    np.testing.assert_allclose(run(model, x=X)["y"], found["y"])


def test_without_a_rule_the_body_is_differentiated() -> None:
    text = ROUNDED.replace("r = Round (c)", "r = Exp (c)").format(opset=21, body=21)
    g = autodiff.gradient(Model.from_proto(onnx.parser.parse_model(text)), of="loss", wrt=["x"])
    check_model(g.ir)
    np.testing.assert_allclose(run(g, x=X)["x.grad"], np.exp(X @ W * 2) @ W.T, rtol=1e-5)


def test_rule_registered_after_loading_is_not_ignored(register: Callable) -> None:
    model = load()
    again = Model.from_proto(onnx.ModelProto.FromString(model.to_bytes()))
    register()
    message = "Rounded was registered after the model was loaded, .*load the model again"
    for loaded in (model, model.copy(), again):
        with pytest.raises(AutodiffError, match=message):
            autodiff.gradient(loaded, of="loss", wrt=["x"])
        with pytest.raises(AutodiffError, match=message):
            autodiff.vjp(loaded, of=["y"], wrt=["x"])
    autodiff.gradient(load(), of="loss", wrt=["x"])


def test_second_derivatives_go_through_what_the_rule_emitted(register: Callable) -> None:
    @autodiff.rule("test.functions", "Rounded")
    def cube(ctx: RuleContext) -> list[ir.Value | None]:
        x = ctx.input(0)
        return [ctx.op.Mul(ctx.cotangent, ctx.op.Mul(x, ctx.op.Mul(x, x)))]

    g = autodiff.vjp(load(), of=["y"], wrt=["p"])
    gg = autodiff.vjp(g, of=["p.grad"], wrt=["p"])
    check_model(gg.ir)
    ones = np.ones((3, 2), np.float32)
    found = run(gg, x=X, **{"y.cotangent": ones, "p.grad.cotangent": ones})["p.grad.grad"]
    np.testing.assert_allclose(found, 3 * (X @ W) ** 2, rtol=1e-5)


def test_functions_inside_functions(register: Callable) -> None:
    """A kept function called from one that is inlined, and one that calls others."""
    register()
    text = ROUNDED.format(opset=21, body=21).replace("y = test.functions.Rounded <scale = 2.0> (p)",
                                                     "y = test.functions.Outer (p)")  # fmt: skip
    text = text.replace("r = Round (c)", "r = test.functions.Inner (c)")
    text += """
    <opset_import: ["" : 21, "test.functions" : 1], domain: "test.functions"> Inner (a) => (b) { b = Round (a) }
    <opset_import: ["" : 21, "test.functions" : 1], domain: "test.functions">
    Outer (a) => (b) { n = Neg (a)  b = test.functions.Rounded <scale = 2.0> (n) }"""
    text = text.replace('<opset_import: ["" : 21], domain', '<opset_import: ["" : 21, "test.functions" : 1], domain')
    model = Model.from_proto(onnx.parser.parse_model(text))
    assert [node.op_type for node in model.ir.graph if node.domain] == ["Rounded"]
    g = autodiff.gradient(model, of="loss", wrt=["x"])
    check_model(g.ir)
    np.testing.assert_allclose(run(g, x=X)["x.grad"], -np.ones((3, 2), np.float32) @ W.T, rtol=1e-6)


def test_a_kept_function_that_would_change_its_meaning_is_refused(register: Callable) -> None:
    register()
    text = ROUNDED.format(opset=11, body=11).replace("ir_version: 10", "ir_version: 8")
    text = text.replace("s = Constant <value_float: float = @scale> ()", "s = Softmax (a)").replace(
        "loss = ReduceSum", "loss = ReduceMax"
    )
    with pytest.raises(
        ModelImportError, match=r"function test.functions.Rounded \(opset 11\): Softmax '.*' has another"
    ):
        Model.from_proto(onnx.parser.parse_model(text))
