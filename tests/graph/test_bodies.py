"""Bodies of loops and branches in the form that differentiation works on."""

from __future__ import annotations

import math

import numpy as np
import onnxruntime

import archipel
from archipel import autodiff


def test_branches_of_a_body_may_return_one_constant() -> None:
    """The `break` makes a branch that returns True and one that returns False; the loop has a True of its own."""

    def repeated(x: float, w: np.ndarray) -> float:
        h = x
        for i in range(w.shape[0]):
            h = np.tanh(h * w[i])
            if h > 3:
                break
        return h

    model = archipel.function(repeated, (np.float64(0.5), np.ones(2)))
    result = autodiff.gradient(model, of="output", wrt=["x"])
    session = onnxruntime.InferenceSession(result.to_bytes(), providers=["CPUExecutionProvider"])
    [found] = session.run(["x.grad"], {"x": np.array(0.5), "w": np.ones(2)})
    once = math.tanh(0.5)
    assert math.isclose(found, (1 - once**2) * (1 - math.tanh(once) ** 2), rel_tol=1e-12)
