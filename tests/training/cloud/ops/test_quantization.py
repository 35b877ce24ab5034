"""Integers between quantizing and dequantizing: with a gradient to the one, as integers to everything else."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import torch

from archipel import Model
from archipel.autodiff import vjp
from archipel.training.cloud import TorchModule

TEXT = """<ir_version: 10, opset_import: ["" : 21]>
g (float[n, 4] x, float[n, 4] z) => (float loss, int8[n, 4] q, int32[n, 4] d) <
    float s = {0.03125}, int8 o = {3}, int32 two = {2}
> {
    q = QuantizeLinear (x, s, o)
    y = DequantizeLinear (q, s, o)  yz = Mul (y, z)  loss = ReduceSum <keepdims = 0> (yz)
    c = Cast <to = 6> (q)  k = Cast <to = 6> (o)  e = Sub (c, k)  d = Div (e, two)
}"""
# Values of which a quarter saturates.
X = np.random.default_rng(0).uniform(-5.5, 5.5, (3, 4)).astype(np.float32)
Z = np.random.default_rng(1).standard_normal((3, 4), np.float32)


def test_integers() -> None:
    model = Model.from_proto(onnx.parser.parse_model(TEXT))
    program = vjp(model, of=["loss"], wrt=["x"])
    session = onnxruntime.InferenceSession(program.to_bytes(), providers=["CPUExecutionProvider"])
    feed = {"x": X, "z": Z, "loss.cotangent": np.array(1.0, np.float32)}
    loss, q, d, expected = session.run(["loss", "q", "d", "x.grad"], feed)

    x = torch.from_numpy(X).requires_grad_()
    found = TorchModule(model)(x, torch.from_numpy(Z))
    np.testing.assert_allclose(found[0].detach().numpy(), loss, rtol=1e-5)
    for ours, theirs in zip(found[1:], (q, d)):
        assert ours.numpy().dtype == theirs.dtype
        np.testing.assert_array_equal(ours.numpy(), theirs)
    (gradient,) = torch.autograd.grad(found[0], [x])
    np.testing.assert_allclose(gradient.numpy(), expected, rtol=1e-6)
    assert 0 < (expected == 0).mean() < 0.6
