"""Functions as Python runs them, and as `TorchModule` runs their graphs; gradients as autodiff finds them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings

import archipel
from archipel import autodiff
from archipel.training.cloud.graphs.torch_module import TorchModule
from tests.frontend import algorithms, array_programs, calling, control_flow, named_programs, odd_programs
from tests.frontend.cases import CASES, Case
from tests.frontend.generated import PROGRAMS, compiled
from tests.frontend.test_functions import compare, runtime
from tests.frontend.test_generated import ARGUMENTS

FILES = (algorithms, array_programs, calling, control_flow, named_programs, odd_programs)
SHORT = {
    "promotion", "subscripts", "integer_arrays", "list_that_a_loop_fills", "lists_in_nested_loops",
    "calls_with_returns", "return_from_inner_loop", "collatz", "recurrent",
}  # fmt: skip
DIFFERENTIATED = {"list_that_a_loop_fills", "recurrent"}

torch.set_num_threads(1)


def chosen(short: set[str]) -> list[Any]:
    return [pytest.param(case, marks=[] if case.function.__name__ in short else [pytest.mark.slow]) for case in CASES]


def name_of(case: Case) -> str:
    return case.function.__name__


@pytest.mark.parametrize("case", chosen(SHORT), ids=name_of)
@pytest.mark.sampled(every=6)
def test_module_gives_what_python_gives(case: Case) -> None:
    module = TorchModule(archipel.function(case.function, case.arguments))
    for arguments in (case.arguments, *case.others):
        with np.errstate(all="ignore"):
            expected = case.function(*arguments)
        given = [torch.from_numpy(np.array(x)) for x in arguments if not isinstance(x, dict)]
        found = module(*given)
        pairs = zip(as_tuple(found), as_tuple(expected), strict=True)
        for i, (ours, theirs) in enumerate(pairs):
            compare(ours.detach().numpy(), theirs, f"output {i}")


@pytest.mark.parametrize("case", chosen(DIFFERENTIATED), ids=name_of)
@pytest.mark.sampled(every=4)
def test_gradients_are_those_of_autodiff(case: Case) -> None:
    model = archipel.function(case.function, case.arguments)
    floats = {np.dtype(np.float32), np.dtype(np.float64)}
    wrt = [port.name for port in model.inputs if np.dtype(port.dtype) in floats]
    of = [port.name for port in model.outputs if np.dtype(port.dtype) in floats]
    if not wrt or not of:
        pytest.skip("no gradient")
    try:
        gradient = autodiff.vjp(model, of=of, wrt=wrt)
    except archipel.errors.AutodiffError:
        pytest.skip("autodiff refuses it")
    arrays = {port.name: np.asarray(x) for port, x in zip(model.inputs, case.arguments)}
    module, rng = TorchModule(model), np.random.default_rng(0)
    tensors = {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}
    for name in wrt:
        tensors[name].requires_grad_()
    found = dict(zip([port.name for port in model.outputs], as_tuple(module(**tensors))))
    weights = {
        name: torch.from_numpy(np.asarray(rng.standard_normal(found[name].shape))).to(found[name]) for name in of
    }
    expected = runtime(gradient)({**arrays, **{f"{name}.cotangent": w.numpy() for name, w in weights.items()}})
    expected = dict(zip([port.name for port in gradient.outputs], expected))
    reached = [name for name in of if found[name].requires_grad]
    ours: tuple[torch.Tensor | None, ...] = (None,) * len(wrt)
    if reached:
        ours = torch.autograd.grad(
            [found[name] for name in reached],
            [tensors[name] for name in wrt],
            [weights[name] for name in reached],
            allow_unused=True,
        )
    for name, mine in zip(wrt, ours):
        theirs = expected[f"{name}.grad"]
        mine_array = np.zeros_like(theirs) if mine is None else mine.numpy()
        np.testing.assert_allclose(mine_array, theirs, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.slow
@settings(max_examples=150)
@given(PROGRAMS)
def test_generated_programs(text: str) -> None:
    program = compiled(text)
    module = TorchModule(archipel.function(program, (3, 5, np.zeros(3))))
    for a, b, items in ARGUMENTS:
        x = np.array(items)
        found = module(torch.tensor(a), torch.tensor(b), torch.from_numpy(x))
        for ours, theirs in zip(found, program(a, b, x.copy()), strict=True):
            compare(ours.numpy(), theirs, text)


def as_tuple(found: Any) -> tuple[Any, ...]:
    return found if isinstance(found, tuple) else (found,)
