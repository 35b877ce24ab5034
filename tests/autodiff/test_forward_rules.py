"""Forward mode's contract, for every operator with a rule: jvp equals finite differences, and <u, J v> = <J^T u, v>."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
from gradient_cases.case import Case, try_examples
from gradient_cases.reference import evaluator

from archipel import Model
from archipel.autodiff import FORWARD, RULES, jvp, vjp
from archipel.graph import check_model

OWN = sorted(key for key, rule in RULES.items() if rule.__module__.startswith("archipel.") and key[0] == "")

# onnx.reference, or the operator itself, rounds these to float32.
ROUNDED = {"Cast", "Celu", "DequantizeLinear", "LayerNormalization", "QuantizeLinear"}


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize("examples", [2, pytest.param(12, marks=pytest.mark.slow)])
@pytest.mark.parametrize("key", OWN, ids=lambda key: key[1])
def test_forward_mode(key: tuple[str, str], examples: int, gradient_cases: dict) -> None:
    try_examples(check_case, gradient_cases[key], examples)


def check_case(case: Case) -> None:
    precise = np.float32 if case.single else np.float64
    inputs = case.arrays(precise)
    forward = evaluator(case.model(precise))
    values = forward.run(case.targets, inputs)
    rng = np.random.default_rng(zlib.crc32(repr(case).encode()))
    names = [case.names[i] for i in case.wrt]
    tangents = {name: rng.standard_normal(inputs[name].shape).astype(inputs[name].dtype) for name in names}
    step = 1e-5
    if case.op_type == "Cast":  # it rounds: a step that both types hold exactly
        tangents, step = {name: np.asarray(np.sign(v)) for name, v in tangents.items()}, 2.0**-10
    cotangents = [rng.standard_normal(np.shape(y)).astype(y.dtype) for y in values]

    model = Model.from_proto(case.model(precise))
    pushed = jvp(model, of=case.targets, wrt=names)
    check_model(pushed.ir)
    feed = inputs | {f"{name}.tangent": v for name, v in tangents.items()}
    found = evaluator(pushed.to_bytes()).run([f"{name}.tangent" for name in case.targets], feed)
    declared = {port.name: port.dtype for port in pushed.outputs}
    for name, y, moved in zip(case.targets, values, found):
        assert moved.shape == y.shape
        assert moved.dtype == declared[f"{name}.tangent"] == declared[name]

    pulled = vjp(model, of=case.targets, wrt=names)
    feed = inputs | {f"{name}.cotangent": u for name, u in zip(case.targets, cotangents)}
    gradients = evaluator(pulled.to_bytes()).run([f"{name}.grad" for name in names], feed)
    forwards, backwards = inner(cotangents, found), inner(list(tangents.values()), gradients)
    tolerance = 1e-5 if case.single or case.op_type in ROUNDED else 1e-9
    assert abs(forwards - backwards) <= tolerance * max(length(cotangents) * length(found), 1e-1)

    if ("", case.op_type) in FORWARD and len(names) > 1:
        # Each input alone: what a rule of forward mode leaves out for those that do not move.
        parts = []
        for name in names:
            alone = jvp(model, of=case.targets, wrt=[name])
            parts.append(
                evaluator(alone.to_bytes()).run(
                    [f"{of}.tangent" for of in case.targets], inputs | {f"{name}.tangent": tangents[name]}
                )
            )
        for together, *alone_each in zip(found, *parts):
            np.testing.assert_allclose(sum(alone_each), together, rtol=1e-3 if case.single else 1e-8, atol=1e-5)

    if not case.single:
        ends = []
        for sign in (1, -1):
            there = inputs | {name: inputs[name] + sign * step * v for name, v in tangents.items()}
            ends.append(forward.run(case.targets, there))
        for moved, after, before in zip(found, *ends):
            expected = (after.astype(np.float64) - before) / (2 * step)
            scale = max(float(np.max(np.abs(expected), initial=0.0)), 1.0)
            assert float(np.max(np.abs(moved - expected), initial=0.0)) < 1e-5 * scale


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize("examples", [1, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("key", OWN, ids=lambda key: key[1])
def test_second_derivatives(key: tuple[str, str], examples: int, gradient_cases: dict) -> None:
    """Forward over reverse: the gradient's movement along a tangent, against differences of the gradient."""

    def check(case: Case) -> None:
        # As in PyTorch, x^0 is a constant: its second derivative in base and exponent is 0.
        constant = key[1] == "Pow" and case.inputs[1] is not None and np.any(case.inputs[1] == 0)
        if not case.single and key[1] not in ROUNDED and not constant:
            check_second(case)

    try_examples(check, gradient_cases[key], examples)


def check_second(case: Case) -> None:
    inputs, model = case.arrays(np.float64), Model.from_proto(case.model(np.float64))
    rng = np.random.default_rng(zlib.crc32(repr(case).encode()) + 1)
    names = [case.names[i] for i in case.wrt]
    tangents = {name: rng.standard_normal(inputs[name].shape) for name in names}
    pulled = vjp(model, of=case.targets, wrt=names)
    shapes = evaluator(case.model(np.float64)).run(case.targets, inputs)
    given = inputs | {f"{of}.cotangent": rng.standard_normal(np.shape(y)) for of, y in zip(case.targets, shapes)}
    gradients, reverse = [f"{name}.grad" for name in names], evaluator(pulled.to_bytes())
    pushed = jvp(pulled, of=gradients, wrt=names)
    check_model(pushed.ir)
    feed = given | {f"{name}.tangent": v for name, v in tangents.items()}
    found = evaluator(pushed.to_bytes()).run([f"{name}.tangent" for name in gradients], feed)
    ends = []
    for sign in (1, -1):
        there = given | {name: inputs[name] + sign * 1e-5 * v for name, v in tangents.items()}
        ends.append(reverse.run(gradients, there))
    for moved, after, before in zip(found, *ends):
        expected = (after - before) / 2e-5
        scale = max(float(np.max(np.abs(expected), initial=0.0)), 1.0)
        assert float(np.max(np.abs(moved - expected), initial=0.0)) < 1e-5 * scale


def inner(a: list[np.ndarray], b: list[np.ndarray]) -> float:
    return sum(float(np.sum(x.astype(np.float64) * y)) for x, y in zip(a, b, strict=True))


def length(arrays: list[np.ndarray]) -> float:
    return float(np.sqrt(inner(arrays, arrays)))
