"""Passes in bodies of If and Loop: what holds for a graph holds for the same nodes in a body, and across its border."""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import numpy_helper

from archipel import Model
from archipel.graph import check_model
from archipel.graph.passes import optimize, remove_dead_code
from archipel.graph.passes.hoisting import hoist_constants
from archipel.graph.passes.inference import optimize_for_inference
from archipel.training.folding import fold_batch_norm, fold_batch_norm_symbolic
from tests.support.in_bodies import FLAG, in_branch, in_loop

HEADER = '<ir_version: 10, opset_import: ["" : 21]>\n'
SIZES = {"b": 5, "t": 5}

# ONNX Runtime 1.31 loses a captured value that comes out of a chain of Casts: "Missing Input".
_ONLY_WHOLE = {"common subexpressions and casts"}


def _module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"patterns_of_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


HERE = Path(__file__).parent
INFERENCE = {
    name: (text, shapes, left) for name, (text, shapes, left) in _module(HERE / "test_inference.py").CASES.items()
}
TRAINING = {name: (text, {}, left) for name, (text, left) in _module(HERE.parent / "test_optimize.py").CASES.items()}
CASES = {
    **{f"predict: {name}": case for name, case in INFERENCE.items()},
    **{f"train: {name}": case for name, case in TRAINING.items()},
}


def parsed(text: str, shapes: dict[str, tuple[int, ...]]) -> onnx.ModelProto:
    proto = onnx.parser.parse_model(HEADER + text)
    rng = np.random.default_rng(0)
    for name, shape in shapes.items():
        content = np.asarray({"one": 1.0, "zero": 0.0}.get(name, rng.standard_normal(shape)), np.float32)
        proto.graph.initializer.append(numpy_helper.from_array(content, name))
    return proto


def outputs(model: Model, seed: int = 1) -> list[np.ndarray]:
    rng, feed = np.random.default_rng(seed), {}
    for port in model.inputs:
        drawn = rng.standard_normal([SIZES.get(str(d), d) for d in port.shape])
        feed[port.name] = np.asarray(drawn > 0) if port.name == FLAG else np.asarray(drawn, np.float32)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(model.to_bytes(), options).run(None, feed)


def inside(model: Model) -> Counter[str]:
    return Counter(node.op_type for body in model.ir.graph.subgraphs() for node in body)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_pattern_with_any_part_outside(name: str) -> None:
    check(name, range(1, len(parsed(*CASES[name][:2]).graph.node)))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled(every=6)
def test_pattern(name: str) -> None:
    check(name, [0])


def check(name: str, starts: Iterable[int]) -> None:
    text, shapes, left = CASES[name]
    proto = parsed(text, shapes)
    for wrapped, times in ((in_branch, 2), (in_loop, 1)):
        for start in [0] if name.partition(": ")[2] in _ONLY_WHOLE else starts:
            model = Model.from_proto(wrapped(proto, start), parameters=shapes)
            expected = [outputs(model, seed) for seed in (1, 3)]
            if name.startswith("predict"):
                optimize_for_inference(model.ir, keep=set(shapes))
            else:
                optimize(model.ir)
            check_model(model.ir)
            for seed, wanted in zip((1, 3), expected, strict=True):
                for found, want in zip(outputs(model, seed), wanted, strict=True):
                    np.testing.assert_allclose(found, want, rtol=2e-5, atol=2e-5)
            if start == 0:
                found = inside(model)
                found["Identity"] -= wrapped is in_loop  # of the condition
                assert +found == Counter({key: times * count for key, count in left.items()})


def test_a_product_around_a_loop_is_not_computed_in_it() -> None:
    text = """g (float[3, 80] d, float[3, 80] x, float[80, 80] v) => (float[80, 80] y) {
        product = Gemm <transA = 1> (d, x)  y = Add (v, product) }"""
    model = Model.from_proto(in_loop(parsed(text, {}), 1))
    optimize(model.ir)
    assert [node.op_type for node in model.ir.graph] == ["Gemm", "Loop"]


def test_constants_leave_bodies_and_parameters_stay() -> None:
    """As deep as they are; what unpacks a stored tensor stays beside its reader, what depends on the loop in it."""
    text = """g (float[b, 4] x, bool flag) => (float[b, 3] y) <int8[4, 3] q = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12},
    float s = {0.5}> {
        y = If (flag) <then_branch = t () => (float[b, 3] a) {
            a = If (flag) <then_branch = u () => (float[b, 3] c) { m = Abs (w)  n = Neg (m)  c = MatMul (x, n) },
                else_branch = v () => (float[b, 3] d) { p = Abs (w)  d = MatMul (x, p) }>
        }, else_branch = e () => (float[b, 3] f) { r = DequantizeLinear (q, s)  f = MatMul (x, r) }>
    }"""
    model = Model.from_proto(parsed(text, {"w": (4, 3)}), parameters=["w"])
    expected = outputs(model)
    assert hoist_constants(model.ir).modified
    assert [node.op_type for node in model.ir.graph] == ["Abs", "Neg", "Abs", "If"]
    assert inside(model) == {"If": 1, "MatMul": 3, "DequantizeLinear": 1}
    np.testing.assert_array_equal(outputs(model)[0], expected[0])
    assert not hoist_constants(model.ir).modified


def test_a_loop_keeps_its_two_inputs() -> None:
    model = Model.from_proto(in_loop(parsed("g (float[2] x) => (float[2] y) { u = Abs (x)  y = Neg (x) }", {})))
    remove_dead_code(model.ir)
    check_model(model.ir)
    assert inside(model) == {"Identity": 1, "Neg": 1}


@pytest.mark.parametrize("wrapped", [in_branch, in_loop])
def test_batch_norm_in_a_body_is_folded(wrapped: object) -> None:
    text = """g (float[b, 2, 4, 4] x) => (float[b, 3, 2, 2] y) {
        a = Conv (x, w)  y = BatchNormalization <epsilon = 0.01> (a, s, t, m, v) }"""
    shapes = {"w": (3, 2, 3, 3), "s": (3,), "t": (3,), "m": (3,), "v": (3,)}
    proto = parsed(text, shapes)
    variance = next(tensor for tensor in proto.graph.initializer if tensor.name == "v")
    variance.CopyFrom(numpy_helper.from_array(np.abs(numpy_helper.to_array(variance)) + 0.5, "v"))
    # Each branch reads the same weight: folding into it would change the other's.
    model = Model.from_proto(wrapped(proto), parameters=shapes)  # type: ignore[operator]
    expected = outputs(model)[0]
    folded = model.copy()
    assert fold_batch_norm_symbolic(model.ir) == (2 if wrapped is in_branch else 1)
    optimize_for_inference(model.ir, keep=set(shapes))
    assert "BatchNormalization" not in inside(model)
    assert inside(model)["Mul"] == 0
    np.testing.assert_allclose(outputs(model)[0], expected, rtol=1e-4, atol=1e-4)
    assert len(fold_batch_norm(folded.ir)) == (0 if wrapped is in_branch else 1)
    np.testing.assert_allclose(outputs(folded)[0], expected, rtol=1e-4, atol=1e-4)


def test_equal_conditions_do_not_make_equal_branches() -> None:
    """Two If nodes that read the same values and do something else stay two."""
    text = """g (float[2] x, bool flag) => (float[2] y) {
        a = If (flag) <then_branch = t () => (float[2] p) { p = Neg (x) },
            else_branch = e () => (float[2] q) { q = Abs (x) }>
        b = If (flag) <then_branch = u () => (float[2] r) { r = Exp (x) },
            else_branch = f () => (float[2] s) { s = Abs (x) }>
        y = Add (a, b) }"""
    model = Model.from_proto(parsed(text, {}))
    expected = outputs(model)[0]
    optimize(model.ir)
    np.testing.assert_array_equal(outputs(model)[0], expected)


def test_a_value_that_only_a_body_reads_is_alive() -> None:
    text = """g (float[2, 3] x, bool flag) => (float[2, 3] y) <float[3] w = {1, 2, 3}> {
        h = Mul (x, w)
        y = If (flag) <then_branch = t () => (float[2, 3] p) {
            p = If (flag) <then_branch = u () => (float[2, 3] r) { r = Neg (h) },
                else_branch = v () => (float[2, 3] s) { s = Mul (h, w) }>
        }, else_branch = e () => (float[2, 3] q) { q = Abs (x) }> }"""
    model = Model.from_proto(parsed(text, {}))
    expected = outputs(model)[0]
    for run in (remove_dead_code, optimize, lambda each: optimize_for_inference(each, keep=())):
        run(model.ir)
        assert isinstance(model.ir, ir.Model)
        np.testing.assert_array_equal(outputs(model)[0], expected)
