"""FLOPs of operators counted by hand and by PyTorch's own counter, and bytes of values that are stored small."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from archipel import Model, models
from archipel.graph.flops import flops, flops_per_example
from archipel.graph.sizes import Sizes

HEADER = '<ir_version: 10, opset_import: ["" : 21]>\n'

# name: (graph, multiply-accumulates for one example)
CASES = {
    "ConvInteger": (
        """g (uint8[b, 4, 9, 9] x, int8[6, 2, 3, 3] w) => (int32[b, 6, 4, 4] y) {
            [layer] y = ConvInteger <group = 2, strides = [2, 2]> (x, w) }""",
        6 * 4 * 4 * (2 * 3 * 3),
    ),
    "QLinearConv": (
        """g (uint8[b, 3, 8, 8] x, int8[5, 3, 3, 3] w) => (uint8[b, 5, 8, 8] y)
        <float s = {0.1}, uint8 z = {3}, int8 n = {0}> {
            [layer] y = QLinearConv <pads = [1, 1, 1, 1]> (x, s, z, w, s, n, s, z) }""",
        5 * 8 * 8 * (3 * 3 * 3),
    ),
    "ConvTranspose": (
        """g (float[b, 4, 5, 5] x, float[4, 3, 2, 2] w) => (float[b, 3, 10, 10] y) {
            [layer] y = ConvTranspose <strides = [2, 2]> (x, w) }""",
        4 * 5 * 5 * (3 * 2 * 2),
    ),
    "MatMulInteger": (
        "g (uint8[b, 7, 5] x, int8[5, 6] w) => (int32[b, 7, 6] y) { [layer] y = MatMulInteger (x, w) }",
        7 * 5 * 6,
    ),
    "QLinearMatMul": (
        """g (uint8[b, 5] x, int8[5, 6] w) => (uint8[b, 6] y) <float s = {0.1}, uint8 z = {3}, int8 n = {0}> {
            [layer] y = QLinearMatMul (x, s, z, w, s, n, s, z) }""",
        5 * 6,
    ),
    "Gemm": (
        "g (float[5, b] x, float[6, 5] w) => (float[b, 6] y) { [layer] y = Gemm <transA = 1, transB = 1> (x, w) }",
        5 * 6,
    ),
    "Einsum of two": (
        """g (float[b, 3, 4, 5] x, float[b, 3, 6, 5] w) => (float[b, 3, 4, 6] y) {
            [layer] y = Einsum <equation = "bhqd, bhkd -> bhqk"> (x, w) }""",
        3 * 4 * 6 * 5,
    ),
    "Einsum with an ellipsis and no arrow": (
        """g (float[b, 3, 4] x, float[4, 6] w) => (float[b, 3, 6] y) {
            [layer] y = Einsum <equation = "...j,jk"> (x, w) }""",
        3 * 4 * 6,
    ),
    "Einsum of three, one after the other": (
        """g (float[b, 4] x, float[4, 5] w, float[5, 6] v) => (float[b, 6] y) {
            [layer] y = Einsum <equation = "bi,ij,jk->bk"> (x, w, v) }""",
        4 * 5 + 5 * 6,
    ),
    "LSTM in both directions": (
        """g (float[7, b, 4] x, float[2, 12, 4] w, float[2, 12, 3] r) => (float[7, 2, b, 3] y) {
            [layer] y = LSTM <hidden_size = 3, direction = "bidirectional"> (x, w, r) }""",
        2 * 7 * (12 * 4 + 12 * 3),
    ),
    "dequantized weights": (
        """g (float[b, 8] x, uint4[8, 6] q) => (float[b, 6] y) <float s = {0.1}> {
            w = DequantizeLinear (q, s)  [layer] y = MatMul (x, w) }""",
        8 * 6,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_an_operator(name: str) -> None:
    text, products = CASES[name]
    model = Model.from_proto(onnx.parser.parse_model(HEADER + text))
    assert flops(model) == {"layer": 2 * products}
    assert flops_per_example(model) == 2 * products


def test_an_einsum_of_one_operand_multiplies_nothing() -> None:
    text = 'g (float[b, 4] x) => (float[4, b] y) { y = Einsum <equation = "ij->ji"> (x) }'
    assert flops(Model.from_proto(onnx.parser.parse_model(HEADER + text))) == {}


def test_local_functions_count() -> None:
    text = """
    <ir_version: 10, opset_import: ["" : 21, "local" : 1]> g (float[b, 4] x, float[4, 3] w) => (float[b, 3] y) {
        y = local.twice (x, w) }
    <domain: "local", opset_import: ["" : 21]> twice (x, w) => (y) {
        a = MatMul (x, w) c = MatMul (x, w) y = Add (a, c) }
    """
    assert flops_per_example(Model.from_proto(onnx.parser.parse_model(text))) == 2 * 2 * 4 * 3


@pytest.mark.parametrize(("dtype", "bits"), [("uint4", 4), ("int4", 4), ("int8", 8), ("float16", 16), ("int32", 32)])
def test_stored_bytes(dtype: str, bits: int) -> None:
    text = f"g ({dtype}[b, 7] x) => ({dtype}[b, 7] y) {{ y = Identity (x) }}"
    model = Model.from_proto(onnx.parser.parse_model(HEADER + text))
    assert Sizes(model.ir, 3).nbytes(model.ir.graph.inputs[0]) == math.ceil(3 * 7 * bits / 8)


NETWORKS: dict[str, tuple[Callable[[], torch.nn.Module], tuple[int, ...] | None]] = {
    "cnn_1d": (lambda: models.cnn_1d(0), (6, 128)),
    "resnet8": (lambda: models.resnet8(0), (3, 32, 32)),
    "ds_cnn": (lambda: models.ds_cnn(0), (1, 49, 10)),
    "mobilenet_v2": (lambda: models.mobilenet_v2(0, width=0.25), (3, 32, 32)),
    "autoencoder": (lambda: models.autoencoder(0), (1, 28, 28)),
    "unet": (lambda: models.unet(0), (1, 32, 32)),
    "lenet": (lambda: models.lenet(0), (1, 28, 28)),
    "mlp": (lambda: models.mlp(0), (784,)),
    "transformer": (lambda: models.transformer(0, width=32), None),
}


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(
    "name", [name if name == "mlp" else pytest.param(name, marks=pytest.mark.slow) for name in NETWORKS]
)
def test_a_network_as_pytorch_counts_it(name: str) -> None:
    make, shape = NETWORKS[name]
    network = make().eval()
    example = torch.zeros(2, 12, dtype=torch.int64) if shape is None else torch.randn(2, *shape)
    # Its fused attention on the CPU is not counted.
    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        network(example)
    model = Model.from_torch(network, example)
    assert flops_per_example(model) == counter.get_total_flops() // 2


@pytest.mark.slow
@pytest.mark.parametrize("form", ["QDQ", "QOperator"])
def test_quantization_changes_no_count(form: str, tmp_path: Path) -> None:
    from onnxruntime import quantization as ortq

    model = Model.from_torch(models.lenet(0), torch.randn(2, 1, 28, 28))
    model.save(tmp_path / "float.onnx")

    class Reader(ortq.CalibrationDataReader):
        feeds = [{"input": np.random.default_rng(0).standard_normal((4, 1, 28, 28)).astype(np.float32)}]

        def get_next(self) -> dict[str, np.ndarray] | None:
            return self.feeds.pop() if self.feeds else None

    quantized = tmp_path / "int8.onnx"
    ortq.quantize_static(
        tmp_path / "float.onnx", quantized, Reader(), quant_format=ortq.QuantFormat[form], per_channel=form == "QDQ",
        op_types_to_quantize=["Conv", "MatMul"],
    )  # fmt: skip
    found = Model.from_onnx(quantized)
    assert {"QDQ": "DequantizeLinear", "QOperator": "QLinearConv"}[form] in {n.op_type for n in found.ir.graph}
    assert flops_per_example(found) == flops_per_example(model)
