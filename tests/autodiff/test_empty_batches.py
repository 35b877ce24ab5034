"""Gradients of a batch without examples: zeros for weights, nothing for the batch, as in PyTorch.

Depthwise kernels are left out: where ONNX Runtime joins a Transpose with a MatMul of three axes whose sums have no
terms, it returns memory that it has not written (1.31.1).
"""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest

from archipel import Model, autodiff

LAYERS = {
    "small kernel": ("float[n, 2, 5, 5] x, float[3, 2, 3, 3] w", "y = Conv <pads = [1, 1, 1, 1]> (x, w)"),
    "large kernel": ("float[n, 4, 6, 6] x, float[2, 4, 5, 5] w", "y = Conv (x, w)"),
    "many filters": ("float[n, 8, 2, 2] x, float[8, 8, 2, 2] w", "y = Conv (x, w)"),
    "strided transpose": ("float[n, 2, 5, 5] x, float[2, 3, 3, 3] w", "y = ConvTranspose <strides = [2, 2]> (x, w)"),
    "LayerNormalization": ("float[n, 4] x, float[4] w", "y = LayerNormalization (x, w)"),
    "Loop": (
        "float[n, 3] x, float[3, 3] w",
        """y = Loop (three, , x) <body = step (int64 i, bool go_in, float[n, 3] a) => (bool go, float[n, 3] b) {
            go = Identity (go_in)  p = MatMul (a, w)  b = Tanh (p)
        }>""",
    ),
}


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.sampled(every=6)
def test_no_example_moves_no_weight(layer: str) -> None:
    inputs, nodes = LAYERS[layer]
    text = f"""<ir_version: 10, opset_import: ["" : 21]> agraph ({inputs}) => (float loss) <int64 three = {{3}}>
        {{ {nodes}  yy = Mul (y, y)  loss = ReduceSum <keepdims = 0> (yy) }}"""
    m = Model.from_proto(onnx.parser.parse_model(text))
    x, w = ([size if isinstance(size, int) else 0 for size in port.shape] for port in m.inputs)
    feed = {"x": np.ones(x, np.float32), "w": np.ones(w, np.float32)}
    tangents = {"x.tangent": feed["x"], "w.tangent": feed["w"]}
    for made, suffix in (
        (autodiff.gradient(m, wrt=["x", "w"]), "grad"),
        (autodiff.hessian_vector(m, wrt=["x", "w"]), "hvp"),
    ):
        session = onnxruntime.InferenceSession(made.to_bytes(), providers=["CPUExecutionProvider"])
        names = [port.name for port in session.get_inputs()]
        found = session.run([f"x.{suffix}", f"w.{suffix}"], {name: (feed | tangents)[name] for name in names})
        np.testing.assert_array_equal(found[0], np.zeros(x))
        np.testing.assert_array_equal(found[1], np.zeros(w))
