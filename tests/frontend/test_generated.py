"""Generated programs, as Python runs them and as graphs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

import archipel
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
def test_generated_programs(text: str) -> None:
    _check(text)


@pytest.mark.slow
@settings(max_examples=400)
@given(PROGRAMS)
def test_many_generated_programs(text: str) -> None:
    _check(text)
