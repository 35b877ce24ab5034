"""Gradients of reductions where they have no derivative, against PyTorch: equal extremes, and norms of nothing."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from archipel.autodiff import vjp
from archipel.graph import Model

X = np.array([[3.0, 1.0, 3.0], [0.0, 0.0, 0.0], [2.0, 2.0, -5.0], [-1.0, 4.0, 0.5]], np.float32)
COTANGENT = np.array([1.0, 2.0, -3.0, 0.5], np.float32)


@pytest.mark.parametrize(
    ("operator", "function"),
    [
        ("ReduceMax", lambda x: x.amax(1)),
        ("ReduceMin", lambda x: x.amin(1)),
        ("ReduceL1", lambda x: x.abs().sum(1)),
        ("ReduceL2", lambda x: torch.linalg.vector_norm(x, dim=1)),
    ],
)
def test_the_gradient_is_pytorchs(operator: str, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    text = f"g (float[n, 3] x) => (float[n] y) <int64[1] a = {{1}}> {{ y = {operator} <keepdims = 0> (x, a) }}"
    model = Model.from_proto(onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]> {text}'))
    program = vjp(model, of=["y"], wrt=["x"])
    session = onnxruntime.InferenceSession(program.to_bytes(), providers=["CPUExecutionProvider"])
    given = {"x": X, "y.cotangent": COTANGENT}
    (found,) = session.run(["x.grad"], {port.name: given[port.name] for port in session.get_inputs()})
    x = torch.from_numpy(X.copy()).requires_grad_()
    (expected,) = torch.autograd.grad(function(x), [x], [torch.from_numpy(COTANGENT)])
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-6, atol=1e-7)
