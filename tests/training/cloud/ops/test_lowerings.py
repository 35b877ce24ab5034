"""The contract of every lowering: PyTorch computes what onnx.reference computes, and autodiff's gradient of it."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
import torch
from gradient_cases.case import Case
from gradient_cases.reference import evaluator
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from archipel import Model
from archipel.autodiff import RULES, vjp
from archipel.training.cloud.graphs.torch_module import TorchModule
from archipel.training.cloud.ops import LOWERINGS

OWN = sorted(key for key, rule in RULES.items() if rule.__module__.startswith("archipel."))


@pytest.mark.parametrize("times", [1, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("key", [key for key in OWN if key[0] == "" and key in LOWERINGS], ids=lambda key: key[1])
@pytest.mark.sampled(every=6)
def test_lowering(key: tuple[str, str], times: int, gradient_cases: dict) -> None:
    @settings(
        max_examples=4 * times,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        check_case(data.draw(gradient_cases[key]))

    check()


def test_every_operator_with_a_gradient_rule_has_a_lowering() -> None:
    assert set(OWN) <= set(LOWERINGS)


def relative(found: np.ndarray, expected: np.ndarray) -> float:
    scale = max(float(np.max(np.abs(expected.astype(np.float64)), initial=0.0)), 1e-3)
    return float(np.max(np.abs(found.astype(np.float64) - expected.astype(np.float64)), initial=0.0)) / scale


def as_tensor(array: np.ndarray) -> torch.Tensor:
    if array.dtype.kind == "V" or array.dtype.name in ("int4", "uint4"):  # PyTorch has no tensors of four bits
        return torch.from_numpy(array.astype(np.uint8 if array.dtype.name == "uint4" else np.int8))
    return torch.from_numpy(np.array(array))


def check_case(case: Case) -> None:
    rng = np.random.default_rng(zlib.crc32(repr(case).encode()))
    precise = np.float32 if case.single else np.float64
    tolerance = 1e-4 if case.single else 1e-6
    names = [case.names[i] for i in case.wrt]
    arrays = case.arrays(precise)
    expected = evaluator(case.model(precise)).run(case.targets, arrays)

    model = Model.from_proto(case.model(precise))
    module = TorchModule(model)
    given = {name: as_tensor(array) for name, array in arrays.items()}
    for name in names:
        given[name].requires_grad_()
    found = module(*[given[info.name] for info in model.inputs])
    outputs = dict(zip([info.name for info in model.outputs], found if isinstance(found, tuple) else (found,)))
    wanted = [outputs[name] for name in case.targets]
    for ours, theirs in zip(wanted, expected):
        assert tuple(ours.shape) == theirs.shape
        assert ours.dtype == as_tensor(np.asarray(theirs)).dtype
        assert relative(ours.detach().numpy(), np.asarray(theirs)) < tolerance

    cotangents = [rng.standard_normal(np.shape(y)).astype(np.asarray(y).dtype) for y in expected]
    feed = {**arrays, **{f"{name}.cotangent": value for name, value in zip(case.targets, cotangents)}}
    gradient = evaluator(vjp(Model.from_proto(case.model(precise)), of=case.targets, wrt=names).to_bytes())
    theirs = gradient.run([f"{name}.grad" for name in names], feed)
    seeds = [torch.from_numpy(value) for value in cotangents]
    # What a loop without iterations stacks follows from nothing.
    following = [(y, seed) for y, seed in zip(wanted, seeds) if y.requires_grad]
    ours: tuple[torch.Tensor | None, ...] = (None,) * len(names)
    if following:
        results, weights = zip(*following)
        ours = torch.autograd.grad(results, [given[name] for name in names], weights, allow_unused=True)
    for mine, other in zip(ours, theirs):
        mine_array = np.zeros_like(other) if mine is None else mine.numpy()
        assert relative(mine_array, other) < (1e-3 if case.single else 1e-6)
