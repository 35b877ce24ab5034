"""Rules of one's own, and what happens to one that breaks its contract."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from archipel import Model, autodiff
from archipel.autodiff import RULES, RuleContext
from archipel.errors import AutodiffError, MissingRuleError

CUBE = """<ir_version: 10, opset_import: ["" : 21, "test.archipel" : 1]>
agraph (double[n] x) => (double s) <double[n] y> {
    y = test.archipel.Cube (x)
    s = ReduceSum <keepdims = 0> (y)
}"""


class Cube(OpRun):
    op_domain = "test.archipel"

    def _run(self, x: np.ndarray) -> tuple[np.ndarray]:
        return (x**3,)


@pytest.fixture
def cube() -> Model:
    return Model.from_proto(onnx.parser.parse_model(CUBE))


@pytest.fixture
def register() -> Iterator[Callable]:
    yield autodiff.rule("test.archipel", "Cube")
    RULES.pop(("test.archipel", "Cube"), None)


def test_rule_for_a_custom_operator(cube: Model, register: Callable) -> None:
    @register
    def rule(ctx: RuleContext) -> list:
        x = ctx.input(0)
        return [ctx.op.Mul(ctx.cotangent, ctx.op.Mul(ctx.op.Mul(x, x), 3.0))]

    g = autodiff.gradient(cube, of="s", wrt=["x"])
    x = np.array([1.0, -2.0, 0.5])
    found = ReferenceEvaluator(g.to_bytes(), new_ops=[Cube]).run(["x.grad"], {"x": x})[0]
    np.testing.assert_allclose(found, 3 * x**2)


def test_custom_operator_without_rule(cube: Model) -> None:
    with pytest.raises(MissingRuleError, match=r"test.archipel::Cube .*@autodiff.rule\('test.archipel', 'Cube'\)"):
        autodiff.gradient(cube, of="s", wrt=["x"])


def test_second_rule_for_an_operator() -> None:
    autodiff.gradient(Model.from_proto(onnx.parser.parse_model(CUBE)), of="s", wrt=["y"])
    with pytest.raises(AutodiffError, match=r"ai.onnx::Exp already has one, in archipel/autodiff/rules/elementwise.py"):
        autodiff.rule("", "Exp")(lambda ctx: [])


def test_rule_without_operator() -> None:
    with pytest.raises(AutodiffError, match="name the operators"):
        autodiff.rule("test.archipel")


BROKEN = {
    "wrong type": (lambda ctx: [ctx.op.Cast(ctx.cotangent, to=1)], "gradient of input 0 is FLOAT, the input DOUBLE"),
    "wrong shape": (lambda ctx: [ctx.op.Unsqueeze(ctx.cotangent, [0])], r"gradient of input 0 has shape \[1, 'n'\]"),
    "too many": (lambda ctx: [ctx.cotangent, ctx.cotangent], "2 gradients for 1 inputs"),
    "missing input": (lambda ctx: [ctx.input(1)], "Cube '.*': input 1 is missing"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_rule_that_breaks_its_contract_is_named(case: str, cube: Model, register: Callable) -> None:
    function, message = BROKEN[case]
    register(function)
    with pytest.raises(AutodiffError, match=message):
        autodiff.gradient(cube, of="s", wrt=["x"])
