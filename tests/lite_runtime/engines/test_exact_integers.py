"""Quantized layers compute what their graphs say, also where a processor's integer kernels overflow."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, parser
from onnx.reference import ReferenceEvaluator

from archipel.lite_runtime.engines import onnx_runtime
from archipel.lite_runtime.engines.onnx_runtime import open_exact, products_overflow

X = np.random.default_rng(0).integers(128, 256, (5, 64)).astype(np.uint8)
STATIC = """<ir_version: 10, opset_import: ["": 21]>
net (float[n, 64] x) => (float[n, 16] y)
<float s = {0.5}, uint8 z = {0}, float t = {4000}> {
    q = QuantizeLinear(x, s, z)
    d = DequantizeLinear(q, s, z)
    v = DequantizeLinear(w, s)
    h = MatMul(d, v)
    r = QuantizeLinear(h, t, z)
    y = DequantizeLinear(r, t, z)
}"""
DYNAMIC = """<ir_version: 10, opset_import: ["": 21]>
net (float[n, 64] x) => (float[n, 16] y) {
    q, s, z = DynamicQuantizeLinear(x)
    p = MatMulInteger(q, w, z)
    f = Cast<to = 1>(p)
    y = Mul(f, s)
}"""


def test_the_product_is_asked_for_in_onnx() -> None:
    inputs = [helper.make_tensor_value_info(n, t, None) for n, t in (("a", TensorProto.UINT8), ("b", TensorProto.INT8))]
    output = helper.make_tensor_value_info("y", TensorProto.INT32, None)
    graph = helper.make_graph([helper.make_node("MatMulInteger", ["a", "b"], ["y"])], "", inputs, [output])
    model = helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 13)])
    assert onnx.load_from_string(onnx_runtime._PRODUCT) == model


@pytest.mark.skipif(sys.platform != "linux" or platform.machine() != "x86_64", reason="reads Linux' list of flags")
def test_processors_without_vnni_overflow() -> None:
    flags = Path("/proc/cpuinfo").read_text().partition("flags")[2].partition("\n")[0].split()
    assert products_overflow() == ("avx2" in flags and not {"avx512_vnni", "avx_vnni"} & set(flags))


@pytest.mark.parametrize("text", [STATIC, DYNAMIC], ids=["static", "dynamic"])
@pytest.mark.parametrize("overflow", [False, True], ids=["this processor", "one that overflows"])
def test_answers_are_those_of_the_graph(
    text: str, overflow: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = parser.parse_model(text)
    # The largest of int8 side by side: their products with the data are beyond 16 bits.
    weights = np.full((64, 16), 127, np.int8)
    weights[:, ::2] = -127
    model.graph.initializer.append(onnx.numpy_helper.from_array(weights, "w"))
    x = X.astype(np.float32) / 2
    if overflow:
        monkeypatch.setattr(onnx_runtime, "products_overflow", lambda: True)
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    session = open_exact(model.SerializeToString(), options)
    [expected] = ReferenceEvaluator(model).run(None, {"x": x})
    [answer] = session.run(None, {"x": x})
    np.testing.assert_allclose(answer, expected, rtol=1e-6, atol=4000 if text is STATIC else 0)  # one step of t
    assert np.abs(expected).max() > 100_000
    if overflow:
        made = onnx.load(tmp_path / "optimized.onnx").graph
        integers = {each.name for each in made.initializer if each.data_type == TensorProto.INT8}
        products = {n.op_type for n in made.node if "MatMul" in n.op_type and integers & set(n.input)}
        assert not products


def test_what_cannot_be_moved_to_uint8_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime's own quantizer writes QGemm, of whose zero points its rewriting loses some."""
    monkeypatch.setattr(onnx_runtime, "products_overflow", lambda: True)
    text = """<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]>
    net (uint8[n, 64] x) => (float[n, 16] y) <float s = {0.5}, uint8 z = {128}> {
        y = com.microsoft.QGemm<alpha = 1.0>(x, s, z, w, scales, zeros)
    }"""
    model = parser.parse_model(text)
    small = np.random.default_rng(1).integers(-63, 64, (64, 16)).astype(np.int8)
    scales, zeros = np.linspace(0.5, 2, 16).astype(np.float32), np.zeros(16, np.int8)
    for name, array in (("w", small), ("scales", scales), ("zeros", zeros)):
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    [answer] = open_exact(model.SerializeToString(), onnxruntime.SessionOptions()).run(None, {"x": X})
    expected = (X.astype(np.int64) - 128) @ small.astype(np.int64) * 0.5 * scales
    np.testing.assert_allclose(answer, expected, rtol=1e-5)
