"""Convolutions over one axis as pictures: the same answers, and only where it pays."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx.reference import ReferenceEvaluator

from archipel import Model
from archipel.graph import check_model
from archipel.graph.passes import remove_dead_code, unit_height

HEADER = '<ir_version: 10, opset_import: ["" : 21]>\n'
WEIGHTS = {"w": (8, 2, 3), "v": (8, 8, 3), "d": (8, 1, 3), "u": (8, 8, 2), "b": (8,), "s": (1, 8, 1)}

# name: (graph, Unsqueezes of activations, Squeezes)
CASES = {
    "a network": (
        """g (float[n, 2, 16] x) => (float[n, 64] y) <int64[2] t = {-1, 64}> {
            a = Conv <pads = [1, 1]> (x, w, b)  c = Relu (a)  p = MaxPool <kernel_shape = [2], strides = [2]> (c)
            e = Conv <pads = [2, 2], dilations = [2]> (p, v)  y = Reshape (e, t) }""",
        1,
        0,
    ),
    "flattened": (
        """g (float[n, 2, 16] x) => (float[n, 112] y) {
            a = Conv (x, w)  p = AveragePool <kernel_shape = [2], strides = [1], pads = [1, 1]> (a)
            q = MaxPool <auto_pad = "SAME_UPPER", kernel_shape = [3]> (p)  r = AveragePool <kernel_shape = [2]> (q)
            y = Flatten (r) }""",
        1,
        0,
    ),
    "a residual, and a result read by others": (
        """g (float[n, 8, 16] x) => (float[n, 8, 16] y, float[n, 8] m) <int64[1] last = {2}> {
            a = Conv <auto_pad = "SAME_UPPER"> (x, v)  c = Conv <group = 8, pads = [1, 1]> (a, d)  e = Add (x, c)
            f = Mul (e, s)  y = LeakyRelu <alpha = 0.2> (f)  m = ReduceMax <keepdims = 0> (e, last) }""",
        1,
        2,
    ),
    "up again, to one number": (
        """g (float[n, 8, 6] x) => (float[n, 8, 1] y) {
            a = ConvTranspose <strides = [2], output_padding = [1]> (x, u)  c = Sigmoid (a)
            y = GlobalAveragePool (c) }""",
        1,
        1,
    ),
}


def load(text: str) -> Model:
    proto = onnx.parser.parse_model(HEADER + text)
    rng = np.random.default_rng(0)
    used = {name for node in proto.graph.node for name in node.input}
    for name, shape in WEIGHTS.items():
        if name in used:
            content = rng.standard_normal(shape).astype(np.float32)
            proto.graph.initializer.append(onnx.numpy_helper.from_array(content, name))
    return Model.from_proto(proto)


@pytest.mark.parametrize("name", CASES)
def test_the_same_answers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text, entries, exits = CASES[name]
    model = load(text)
    before = model.to_bytes()
    monkeypatch.setattr(unit_height, "_WORTH", 0)
    unit_height.add_unit_height(model.ir)
    remove_dead_code(model.ir)
    check_model(model.ir)
    counts = Counter(
        node.op_type for node in model.ir.graph if node.inputs[0] not in model.ir.graph.initializers.values()
    )
    assert (counts["Unsqueeze"], counts["Squeeze"]) == (entries, exits)
    for node in model.ir.graph:
        if "Conv" in node.op_type or "Pool" in node.op_type:
            assert len(node.outputs[0].shape) == 4
    shape = [3, *model.inputs[0].shape[1:]]
    x = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    expected = onnxruntime.InferenceSession(before).run(None, {"x": x})
    runs = [onnxruntime.InferenceSession(model.to_bytes()).run(None, {"x": x})]
    if "auto_pad" not in text and "ConvTranspose" not in text:  # what onnx.reference computes in its own way
        runs.append(ReferenceEvaluator(model.to_bytes()).run(None, {"x": x}))
    for found in runs:
        for one, other in zip(found, expected):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("text", "lifted"),
    [
        ("g (float[n, 2, 16] x) => (float[n, 8, 14] y) { y = Conv (x, w) }", False),
        ("g (float[n, 2, 20000] x) => (float[n, 8, l] y) { y = Conv (x, w) }", True),
        ("g (float[n, 4, 20000] x) => (float[n, 4, l] y) { y = MaxPool <kernel_shape = [2]> (x) }", False),
        # A weight that is stored small, one that comes from outside, and indices of maxima.
        (
            """g (float[n, 2, 20000] x, int8[8, 2, 3] q) => (float[n, 8, l] y) <float z = {0.5}> {
                k = DequantizeLinear (q, z)  y = Conv (x, k) }""",
            False,
        ),
        ("g (float[n, 8, 20000] x, float[8, 8, 3] k) => (float[n, 8, l] y) { y = Conv (x, k) }", False),
        (
            """g (float[n, 8, 20000] x) => (float[n, 8, l] y, int64[n, 8, l] i) {
                y, i = MaxPool <kernel_shape = [2]> (x) }""",
            False,
        ),
    ],
)
def test_where_it_pays(text: str, lifted: bool) -> None:
    model = load(text)
    unit_height.add_unit_height(model.ir)
    assert any(node.op_type == "Unsqueeze" for node in model.ir.graph) == lifted
