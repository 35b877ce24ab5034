"""What BatchNormalization is folded into, and what it is not; the numbers against onnx.reference of the whole model."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx.reference import ReferenceEvaluator

from archipel import Model
from archipel.graph import check_model
from archipel.training.folding import fold_batch_norm

NORM = "BatchNormalization <epsilon = 0.01> ({}, s, t, m, v)"
VALUES = "float[3] s = {1, -2, 0.5}, float[3] t = {0.25, 1, -1}, float[3] m = {0.5, 0, 2}, float[3] v = {1, 0.5, 3}"
DENSE = "float[2, 3] w = {1, 2, 3, 4, 5, 6}, float[3, 3] u = {1, 0, 2, -1, 3, 1, 0, 0, 1}, float[3] b = {1, 0, -1}"


def load(body: str, outputs: str = "float[n, 3] y") -> Model:
    text = f"agraph (float[n, 2] x) => ({outputs}) <{DENSE}, {VALUES}> {{ {body} }}"
    return Model.from_proto(onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]>\n{text}'))


def run(model: Model) -> list[np.ndarray]:
    x = np.random.default_rng(0).standard_normal((4, 2)).astype(np.float32)
    return ReferenceEvaluator(ir.to_proto(model.ir)).run(None, {"x": x})


@pytest.mark.parametrize(
    ("body", "folds", "left"),
    [
        ("a = Gemm (x, w) y = " + NORM.format("a"), [("w", "w_bias")], []),
        ("a = Gemm <alpha = 0.5> (x, w, b) y = " + NORM.format("a"), [("w", "b")], []),
        (f"a = Gemm (x, w, b) c = {NORM.format('a')} d = Gemm (c, u, b) y = {NORM.format('d')}", 2, []),
        (f"a = Gemm (x, w) c = {NORM.format('a')} y = {NORM.format('c')}", [("w", "w_bias"), ("w", "w_bias")], []),
        # Read by somebody else too, scaled, used twice, computed, no layer at all.
        (f"a = Gemm (x, w) c = {NORM.format('a')} y = Add (a, c)", [], ["c"]),
        ("a = Gemm <beta = 2.0> (x, w, b) y = " + NORM.format("a"), [], ["y"]),
        (f"a = Gemm (x, w) c = {NORM.format('a')} d = Gemm (x, w) y = Add (c, d)", [], ["c"]),
        (f"k = Neg (w) a = Gemm (x, k) y = {NORM.format('a')}", [], ["y"]),
        (f"a = MatMul (x, w) y = {NORM.format('a')}", [], ["y"]),
    ],
)
def test_what_is_folded(body: str, folds: list | int, left: list[str]) -> None:
    model = load(body)
    expected = run(model)
    found = fold_batch_norm(model.ir)
    check_model(model.ir)
    if isinstance(folds, int):  # a bias that two layers share becomes one of each
        assert [fold.bias for fold in found] == ["w_bias", "b"]
    else:
        assert [(fold.weight, fold.bias) for fold in found] == folds
    norms = [node for node in model.ir.graph if node.op_type == "BatchNormalization"]
    assert [node.outputs[0].name for node in norms] == left
    np.testing.assert_allclose(run(model)[0], expected[0], rtol=1e-5, atol=1e-6)
    used = {value.name for node in model.ir.graph for value in node.inputs if value is not None}
    assert set(model.parameter_names) == {name for name in used if name in model.ir.graph.initializers}


def test_the_value_before_may_be_an_output() -> None:
    model = load(f"a = Gemm (x, w) y = {NORM.format('a')}", "float[n, 3] a, float[n, 3] y")
    assert fold_batch_norm(model.ir) == []


def test_the_result_keeps_its_name() -> None:
    model = load(f"a = Gemm (x, w) y = {NORM.format('a')}")
    fold_batch_norm(model.ir)
    assert [port.name for port in model.outputs] == ["y"]
