"""Functions as Python runs them and as graphs: the same values, types and shapes."""

from __future__ import annotations

import ast
import inspect
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx.reference import ReferenceEvaluator

import archipel
from archipel import Model
from archipel.frontend import table
from archipel.graph import check_model
from tests.frontend import algorithms, array_programs, calling, control_flow, named_programs, odd_programs
from tests.frontend.cases import CASES, Case

REFERENCE = {"if_else", "collatz", "return_from_inner_loop", "written_out_with_break", "promotion", "integer_arrays"}


@pytest.mark.parametrize("case", CASES, ids=[c.function.__name__ for c in CASES])
@pytest.mark.sampled(every=6)
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


def _called() -> tuple[set[Any], set[str]]:
    """NumPy's and math's functions that the programs call, and the names of methods."""
    functions: set[Any] = set()
    methods: set[str] = set()
    for module in (algorithms, array_programs, calling, control_flow, named_programs, odd_programs):
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            first, *rest = ast.unparse(node.func).split(".")
            owner: Any = {"np": np, "math": math}.get(first)
            if owner is None or not all(map(str.isidentifier, rest)):
                methods.add(node.func.attr)
            else:
                for part in rest:
                    owner = getattr(owner, part)
                functions.add(owner)
    return functions, methods


def test_every_name_is_called() -> None:
    functions, methods = _called()
    types = {np.float32, np.float64, np.int32, np.int64, np.bool_}
    missing = {table.name_of(f) for f in ({*table.FUNCTIONS, *table.COMPOSED} - functions - types)}
    assert not missing, "call them in tests/frontend/array_programs.py"
    assert set(table.METHODS) <= methods
