"""The contract of every gradient rule: it equals PyTorch and finite differences, in standard operators only."""

from __future__ import annotations

import zlib

import numpy as np
import onnxruntime
import pytest
import torch
from gradient_cases.case import Case
from gradient_cases.reference import evaluator
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx.reference import ReferenceEvaluator

from archipel import Model
from archipel.autodiff import RULES, vjp
from archipel.graph import check_model

OWN = sorted(key for key, rule in RULES.items() if rule.__module__.startswith("archipel.") and key[0] == "")
STEP = 1e-5


def relative(found: np.ndarray, expected: np.ndarray, rounding: float = 0.0) -> float:
    """The largest error beyond `rounding`, of the largest number expected."""
    scale = max(float(np.max(np.abs(expected), initial=0.0)), 1e-3)
    return max(float(np.max(np.abs(found.astype(np.float64) - expected), initial=0.0)) - rounding, 0.0) / scale


def rounding(case: Case, of: int) -> float:
    """What float32 alone may be off by in the gradient of input number `of`, for operators that have no float64.

    The gradient of a scale or zero point (input 1 on) is a sum of differences of numbers as large as the inputs, of
    which little may be left. That of the data (input 0) subtracts nothing, and is exact but for its own rounding.
    """
    if not case.single or of == 0:
        return 0.0
    largest = max(float(np.max(np.abs(x), initial=0.0)) for x in case.inputs if x is not None)
    return 4 * float(np.finfo(np.float32).eps) * largest


def test_every_rule_has_cases(gradient_cases: dict) -> None:
    assert set(gradient_cases) == set(OWN)


@pytest.mark.sampled(every=24)
@pytest.mark.parametrize("times", [1, pytest.param(6, marks=pytest.mark.slow)])
@pytest.mark.parametrize("key", OWN, ids=lambda key: key[1])
def test_rule(key: tuple[str, str], times: int, gradient_cases: dict) -> None:
    examples = times * (24 if key[1] in ("Conv", "MaxPool") else 8)

    @settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        case = data.draw(gradient_cases[key])
        check_case(case)

    check()


def check_case(case: Case) -> None:
    rng = np.random.default_rng(zlib.crc32(repr(case).encode()))
    names = [case.names[i] for i in case.wrt]
    precise = np.float32 if case.single else np.float64
    forward = evaluator(case.model(precise))
    inputs = case.arrays(precise)
    ys = forward.run(case.targets, inputs)
    cotangents = [rng.standard_normal(np.shape(y)).astype(y.dtype) for y in ys]
    feed = {**inputs, **{f"{name}.cotangent": value for name, value in zip(case.targets, cotangents)}}

    model = vjp(Model.from_proto(case.model(precise)), of=case.targets, wrt=names)
    check_model(model.ir)
    outputs = [f"{name}.grad" for name in names]
    gradients = evaluator(model.to_bytes()).run(outputs, feed)
    for name, found in zip(names, gradients):
        assert found.shape == inputs[name].shape
        assert found.dtype == inputs[name].dtype

    assert case.torch is not None or not case.single
    if not case.single:
        against_finite_differences(forward, case.targets, inputs, cotangents, dict(zip(names, gradients)), rng)
    if case.torch is not None:
        for of, found, expected in zip(case.wrt, gradients, torch_gradients(case, cotangents)):
            assert relative(found, expected, rounding(case, of)) < (1e-3 if case.single else 1e-6)
    against_onnx_runtime(case, feed, outputs, gradients)


def against_finite_differences(
    forward: ReferenceEvaluator,
    targets: list,
    inputs: dict,
    cotangents: list,
    gradients: dict,
    rng: np.random.Generator,
) -> None:
    for name, gradient in gradients.items():
        for _ in range(2):
            direction = rng.standard_normal(inputs[name].shape)
            step = STEP
            if any(g.dtype == np.float32 for g in cotangents):  # Cast rounds: a step that both types hold exactly
                direction, step = np.sign(direction), 2.0**-10
            ends = []
            for sign in (1, -1):
                moved = {**inputs, name: inputs[name] + sign * step * direction}
                values = forward.run(targets, moved)
                ends.append(sum(np.sum(y.astype(np.float64) * g) for y, g in zip(values, cotangents)))
            expected = (ends[0] - ends[1]) / (2 * step)
            scale = max(float(np.linalg.norm(gradient) * np.linalg.norm(direction)), 1e-3)
            assert abs(np.sum(gradient * direction) - expected) / scale < 1e-6


def torch_tensor(value: np.ndarray) -> torch.Tensor:
    # PyTorch has no tensors of four-bit integers.
    return torch.from_numpy(np.asarray(value) if value.dtype.kind != "V" else value.astype(np.int64))


def torch_gradients(case: Case, cotangents: list[np.ndarray]) -> list[np.ndarray]:
    tensors = [
        None if value is None else torch_tensor(value).requires_grad_(i in case.wrt)
        for i, value in enumerate(case.inputs)
    ]
    found = case.torch(*tensors)
    ys = found if isinstance(found, tuple) else (found,)
    wanted = [tensors[i] for i in case.wrt]
    seeds = [torch.from_numpy(value).to(y.dtype) for y, value in zip(ys, cotangents)]
    return [g.numpy() for g in torch.autograd.grad(ys, wanted, seeds)]


def against_onnx_runtime(case: Case, feed: dict, outputs: list[str], expected: list[np.ndarray]) -> None:
    names = [case.names[i] for i in case.wrt]
    model = vjp(Model.from_proto(case.model(np.float32)), of=case.targets, wrt=names)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model.to_bytes(), options, providers=["CPUExecutionProvider"])
    single = case.arrays(np.float32)
    for name in case.targets:
        key = f"{name}.cotangent"
        single[key] = feed[key].astype(np.float64 if case.op_type == "Cast" else np.float32)
    taken = {port.name for port in session.get_inputs()}
    found = session.run(outputs, {name: value for name, value in single.items() if name in taken})
    for of, ours, theirs in zip(case.wrt, found, expected):
        assert ours.shape == theirs.shape
        assert relative(ours, theirs, rounding(case, of)) < 1e-3
