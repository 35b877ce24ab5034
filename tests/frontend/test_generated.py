"""Generated programs, as Python runs them and as graphs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

import archipel
from archipel import autodiff
from tests.frontend.generated import PROGRAMS, compiled
from tests.frontend.test_functions import compare, runtime

ARGUMENTS = [(3, 5, (0.5, -1.5, 2.0)), (0, -2, (4.0, 0.0, -3.0)), (7, 7, (0.1, 0.2, 0.3))]


def _check(text: str) -> None:
    program = compiled(text)
    model = archipel.function(program, (3, 5, np.zeros(3)))
    run = runtime(model)
    for a, b, items in ARGUMENTS:
        x = np.array(items)
        expected = program(a, b, x.copy())
        found = run({"a": np.array(a), "b": np.array(b), "x": x})
        for ours, theirs in zip(found, expected, strict=True):
            compare(ours, theirs, text)


@settings(max_examples=8)
@given(PROGRAMS)
@pytest.mark.sampled(every=4)
def test_generated_programs(text: str) -> None:
    _check(text)


@pytest.mark.slow
@settings(max_examples=400)
@given(PROGRAMS)
def test_many_generated_programs(text: str) -> None:
    _check(text)


@pytest.mark.slow
@settings(max_examples=100)
@given(PROGRAMS)
def test_gradients_of_generated_programs(text: str) -> None:
    """Against central differences of Python itself, where two of them agree: the others are at a jump."""
    program = compiled(text)
    model = archipel.function(program, (3, 5, np.zeros(3)))
    gradient = autodiff.vjp(model, of=["output_3"], wrt=["x"])
    run, x, weights = runtime(gradient), np.array([0.513, -1.527, 2.031]), np.array([0.7, -1.3, 0.4])
    place = [port.name for port in gradient.outputs].index("x.grad")
    for a, b in ((3, 5), (7, 2)):

        def differences(size: float, a: int = a, b: int = b) -> np.ndarray:
            steps = size * np.eye(3)
            up, down = ([program(a, b, x + sign * step)[3] @ weights for step in steps] for sign in (1, -1))
            return (np.array(up) - np.array(down)) / (2 * size)

        numeric = differences(1e-6)
        if np.allclose(numeric, differences(1.5e-7), rtol=1e-4, atol=1e-4):
            feed = {"a": np.array(a), "b": np.array(b), "x": x, "output_3.cotangent": weights}
            np.testing.assert_allclose(run(feed)[place], numeric, rtol=1e-4, atol=1e-4, err_msg=text)
