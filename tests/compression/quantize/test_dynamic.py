"""Dynamic int8, against onnxruntime's own quantizer and by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import onnxruntime.quantization
import pytest
import torch
from torch import nn

from archipel.compression import DynamicInt8, Examples, StaticInt8
from archipel.errors import CompressionError
from archipel.graph import Model
from tests.support.quantized_network import Apply, Run


def noise(found: np.ndarray, exact: np.ndarray) -> float:
    return float(np.square(found - exact).mean() / np.square(exact).mean())


@pytest.mark.sampled(every=3)
def test_as_far_from_float_as_onnxruntimes(apply: Apply, run: Run, tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(40, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    model = Model.from_torch(network, torch.zeros(2, 40))
    x = np.random.default_rng(0).standard_normal((64, 40)).astype(np.float32)
    found, _ = apply(model, DynamicInt8(per_channel=False))
    exact, ours = run(model, x), run(found.deployed(), x)
    proto = onnx.load_from_string(model.to_bytes())
    del proto.graph.value_info[:]  # it transposes weights, and trips over the shapes they had
    onnx.save(proto, tmp_path / "float.onnx")
    onnxruntime.quantization.quantize_dynamic(
        tmp_path / "float.onnx", tmp_path / "int8.onnx", weight_type=onnxruntime.quantization.QuantType.QInt8
    )
    session = onnxruntime.InferenceSession(tmp_path / "int8.onnx", providers=["CPUExecutionProvider"])
    theirs = session.run(None, {"input": x})[0]
    assert noise(ours, exact) < 1.2 * noise(theirs, exact)
    assert {node.op_type for node in found.deployed().ir.graph} >= {"DynamicQuantizeLinear", "MatMulInteger"}


@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.sampled(every=4)
def test_a_layer_by_hand(apply: Apply, run: Run, per_channel: bool) -> None:
    torch.manual_seed(0)
    layer = nn.Conv2d(2, 3, 3, stride=2, padding=1, bias=True)
    x = np.random.default_rng(0).standard_normal((4, 2, 9, 9)).astype(np.float32)
    found, _ = apply(
        Model.from_torch(layer, torch.from_numpy(x)), DynamicInt8(per_channel=per_channel, convolutions=True)
    )
    low, high = min(x.min(), 0), max(x.max(), 0)
    step = np.float32((high - low) / 255)
    zero = np.round(-low / step)
    rounded = (np.clip(np.round(x / step) + zero, 0, 255) - zero) * step
    weight = layer.weight.detach()
    largest = weight.abs().amax(dim=(1, 2, 3), keepdim=True) if per_channel else weight.abs().max()
    with torch.no_grad():
        layer.weight.copy_(torch.round(weight / (largest / 127)) * (largest / 127))
        expected = layer(torch.from_numpy(rounded.astype(np.float32))).numpy()
    np.testing.assert_allclose(run(found.deployed(), x), expected, atol=1e-5)
    assert "ConvInteger" in {node.op_type for node in found.deployed().ir.graph}


def test_one_rounding_serves_all_that_read_a_value(network: Model, apply: Apply) -> None:
    found, facts = apply(network, DynamicInt8(convolutions=True))
    kinds = [node.op_type for node in found.deployed().ir.graph]
    assert kinds.count("DynamicQuantizeLinear") == 4
    assert len(facts["layers"]) == 4


def test_a_gemm_with_a_factor_stays_float(apply: Apply, run: Run) -> None:
    text = """<ir_version: 10, opset_import: ["" : 21]>
    graph (float[batch, 2] x) => (float[batch, 2] y) <float[2, 2] w = {1, 2, 3, 4}, float[2, 2] v = {1, 2, 3, 4}>
    { h = Gemm <alpha = 2.0> (x, w)  y = MatMul (h, v) }"""
    model = Model.from_proto(onnx.parser.parse_model(text))
    found, facts = apply(model, DynamicInt8())
    assert facts["layers"] == ["v"]
    x = np.array([[1, -1], [0.5, 2]], np.float32)
    np.testing.assert_allclose(run(found.deployed(), x), run(model, x), rtol=0.02, atol=0.2)


def test_errors(network: Model, examples: Examples, apply: Apply) -> None:
    static, _ = apply(network, StaticInt8(), examples)
    with pytest.raises(CompressionError, match="quantized already"):
        apply(static, DynamicInt8())
    with pytest.raises(CompressionError, match="no Gemm or MatMul to quantize; convolutions=True"):
        apply(network, DynamicInt8(exclude=("dense*",)))
    with pytest.raises(CompressionError, match="no Conv or Gemm or MatMul to quantize"):
        apply(network, DynamicInt8(convolutions=True, exclude=("*",)))


def test_convolutions_stay_float_unless_asked_for(network: Model, apply: Apply) -> None:
    _, facts = apply(network, DynamicInt8())
    assert facts["layers"] == ["dense.weight"]
