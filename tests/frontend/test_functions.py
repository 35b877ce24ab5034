"""Functions as Python runs them and as graphs: the same values, types and shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx.reference import ReferenceEvaluator

import archipel
from archipel import Model
from archipel.graph import check_model
from tests.frontend import algorithms, array_programs, calling, control_flow  # noqa: F401  (they fill CASES)
from tests.frontend.cases import CASES, Case

REFERENCE = {"if_else", "collatz", "return_from_inner_loop", "written_out_with_break", "promotion", "integer_arrays"}


@pytest.mark.parametrize("case", CASES, ids=[c.function.__name__ for c in CASES])
def test_graph_gives_what_python_gives(case: Case) -> None:
    model = archipel.function(case.function, case.arguments)
    check_model(model.ir)
    run = runtime(model)
    for arguments in (case.arguments, *case.others):
        with np.errstate(all="ignore"):
            expected = case.function(*arguments)
        expected = expected if isinstance(expected, tuple) else (expected,)
        numbers = [x for x in arguments if not isinstance(x, dict)]
        feed = {port.name: np.asarray(x) for port, x in zip(model.inputs, numbers, strict=True)}
        found = run(feed)
        assert len(found) == len(expected)
        for i, (ours, theirs) in enumerate(zip(found, expected)):
            compare(ours, theirs, f"output {i}")
        if case.function.__name__ in REFERENCE:
            for ours, theirs in zip(run_reference(model, feed), found):
                compare(ours, theirs, "onnx.reference")


def runtime(model: Model) -> Callable[[dict[str, np.ndarray]], list[np.ndarray]]:
    """What runs the model in ONNX Runtime."""
    session = onnxruntime.InferenceSession(model.to_bytes(), providers=["CPUExecutionProvider"])
    return lambda feed: list(session.run(None, feed))


def run_reference(model: Model, feed: dict[str, np.ndarray]) -> list[np.ndarray]:
    return list(ReferenceEvaluator(model.to_bytes()).run(None, feed))


def compare(ours: np.ndarray, theirs: Any, what: str) -> None:
    theirs = np.asarray(theirs)
    assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), what
    np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-6, err_msg=what)
