"""Inverse functions of angles as NumPy has them to the last digits, and their derivatives as PyTorch has them."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
import torch

import archipel
from archipel import autodiff

INSIDE = [-1 + 1e-9, -0.5, 0.0, 1e-9, 0.9, 1 - 1e-7]
ANY = [-1e10, -3.0, -1e-9, 0.0, 1e-5, 0.3, 1.0, 7.0]
POINTS = {
    "arcsin": INSIDE, "arccos": INSIDE, "arctanh": INSIDE, "arctan": ANY, "arcsinh": ANY, "tan": ANY[1:],
    "arccosh": [1 + 1e-7, 1.5, 3.0, 100.0], "sinh": ANY[1:], "cosh": ANY[1:], "expm1": ANY[1:],
}  # fmt: skip
FUNCTIONS = {
    "arcsin": lambda x: np.arcsin(x),
    "arccos": lambda x: np.arccos(x),
    "arctan": lambda x: np.arctan(x),
    "arcsinh": lambda x: np.arcsinh(x),
    "arccosh": lambda x: np.arccosh(x),
    "arctanh": lambda x: np.arctanh(x),
    "tan": lambda x: np.tan(x),
    "sinh": lambda x: np.sinh(x),
    "cosh": lambda x: np.cosh(x),
    "expm1": lambda x: np.expm1(x),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.sampled(every=6)
def test_values_and_derivatives(name: str) -> None:
    for dtype, digits in ((np.float64, 1e-15), (np.float32, 4e-7)):
        x = np.array(POINTS[name], dtype)
        x = x[np.abs(x) < 1] if name in ("arcsin", "arccos", "arctanh") else x  # float32 rounds the first to -1
        model = autodiff.vjp(archipel.function(FUNCTIONS[name], (x,)), of=["output"], wrt=["x"])
        y, slope = onnxruntime.InferenceSession(model.to_bytes()).run(
            None, {"x": x, "output.cotangent": np.ones_like(x)}
        )
        np.testing.assert_allclose(y, FUNCTIONS[name](x), rtol=digits)
        assert y.dtype == dtype
        # PyTorch in float64 says what the slope at the rounded points is, up to the digits of x beside a pole.
        points = torch.tensor(x, dtype=torch.float64, requires_grad=True)
        getattr(torch, name)(points).sum().backward()
        np.testing.assert_allclose(slope, points.grad.numpy(), rtol=1e-7 if dtype == np.float64 else 1e-5)


def test_arctan2_in_all_quadrants() -> None:
    def angle(y, x):
        return np.arctan2(y, x)

    y = np.array([0.0, 1, 1, -1, -1, 0, 0, 2, -3, 1e-200])
    x = np.array([0.0, 1, -1, 1, -1, 2, -2, 0, 0, 1])
    model = autodiff.vjp(archipel.function(angle, (y, x)), of=["output"], wrt=["y", "x"])
    feed = {"y": y, "x": x, "output.cotangent": np.ones_like(y)}
    found, to_y, to_x = onnxruntime.InferenceSession(model.to_bytes()).run(None, feed)
    np.testing.assert_allclose(found, np.arctan2(y, x), rtol=1e-15)
    # d/dy = x / r^2, d/dx = -y / r^2; at the origin there is none.
    np.testing.assert_allclose(to_y[1:], x[1:] / (x**2 + y**2)[1:], rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(to_x[1:], -y[1:] / (x**2 + y**2)[1:], rtol=1e-12, atol=1e-15)
