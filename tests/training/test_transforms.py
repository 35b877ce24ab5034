"""Gradient transforms against torch.nn.utils and torch.autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch

from archipel.errors import TrainingError
from archipel.graph import check_model
from archipel.graph.build import Builder
from archipel.graph.passes import remove_dead_code, share_subexpressions
from archipel.training import transforms

SHAPES: dict[str, tuple[int, ...]] = {"w": (3, 4), "b": (4,), "scale": ()}
TYPES: dict[type[np.floating], float] = {np.float32: 1e-6, np.float64: 1e-7}
Types = dict[str, type[np.floating]]
"""Of the tensors, by name."""


@dataclass
class Context:
    """What a step graph would hand to a transform."""

    op: Builder
    hyperparameters: dict[str, ir.Value] = field(default_factory=dict)

    def step(self) -> ir.Value:
        raise AssertionError("no transform asks for the step")

    def anchor(self, parameter: ir.Value, kind: str) -> ir.Value:
        return self.op.input(f"{parameter.name}.{kind}", parameter.dtype, [int(d) for d in parameter.shape])


def run(
    chain: Sequence[transforms.Transform],
    tensors: dict[str, np.ndarray],
    types: Types,
    given: dict[str, float] | None = None,
) -> dict[str, np.ndarray]:
    """The gradients `<name>.g` of `tensors` after the transforms, each with its default number or the one `given`."""
    g = ir.Graph([], [], nodes=[], opset_imports={"": 21}, name="transforms")
    op = Builder(g)
    kinds = {name: ir.DataType.from_numpy(np.dtype(types[name])) for name in SHAPES}
    parameters = [op.input(name, kinds[name], shape) for name, shape in SHAPES.items()]
    gradients = [op.input(f"{name}.g", kinds[name], shape) for name, shape in SHAPES.items()]
    specs = [spec for transform in chain for spec in transform.hyperparameters]
    context = Context(op, {spec.name: op.input(spec.name, ir.DataType.FLOAT, []) for spec in specs})
    for transform in chain:
        gradients = transform.apply(op, parameters, gradients, context)
    for name, gradient in zip(SHAPES, gradients):
        op.name_output(gradient, f"{name}.out")
    model = ir.Model(g, ir_version=10)
    remove_dead_code(model)
    share_subexpressions(model)
    check_model(model)
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString())
    scalars = {spec.name: np.array((given or {}).get(spec.name, spec.default), np.float32) for spec in specs}
    feed = {**tensors, **scalars}
    found = session.run(
        [f"{name}.out" for name in SHAPES], {port.name: feed[port.name] for port in session.get_inputs()}
    )
    for name, value in zip(SHAPES, found):
        assert (value.dtype, value.shape) == (types[name], SHAPES[name])
    return dict(zip(SHAPES, found))


def draw(types: Types, size: float = 1.0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    names = [f"{name}{suffix}" for name in SHAPES for suffix in ("", ".g", ".start", ".broadcast")]
    return {
        name: np.asarray(size * rng.standard_normal(SHAPES[name.split(".")[0]]), types[name.split(".")[0]])
        for name in names
    }


def clipped(clip: Callable[[list[torch.Tensor]], object], tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    parameters = []
    for name in SHAPES:
        parameter = torch.from_numpy(np.array(tensors[name])).requires_grad_()
        parameter.grad = torch.from_numpy(np.array(tensors[f"{name}.g"]))
        parameters.append(parameter)
    clip(parameters)
    return {name: p.grad.numpy() for name, p in zip(SHAPES, parameters) if p.grad is not None}


def assert_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray], tolerance: float) -> None:
    for name in SHAPES:
        np.testing.assert_allclose(found[name], expected[name], rtol=tolerance, atol=tolerance)


@pytest.fixture(params=TYPES, ids=["float32", "float64"])
def types(request: pytest.FixtureRequest) -> Types:
    return dict.fromkeys(SHAPES, request.param)


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3, 0.0])
@pytest.mark.parametrize("limit", [0.5, 4.0])
def test_clip_by_norm(types: Types, size: float, limit: float) -> None:
    tensors = draw(types, size)
    expected = clipped(lambda p: torch.nn.utils.clip_grad_norm_(p, limit), tensors)
    found = run([transforms.clip_by_norm(limit)], tensors, types)
    assert_same(found, expected, TYPES[types["w"]])
    norm = np.sqrt(sum(np.sum(value.astype(np.float64) ** 2) for value in found.values()))
    assert norm <= limit * (1 + 1e-6)


def test_the_norm_of_gradients_of_several_types() -> None:
    types: Types = {"w": np.float32, "b": np.float64, "scale": np.float32}
    tensors = draw(types)
    expected = clipped(lambda p: torch.nn.utils.clip_grad_norm_(p, 0.5), tensors)
    assert_same(run([transforms.clip_by_norm(0.5)], tensors, types), expected, 1e-6)


@pytest.mark.parametrize("limit", [0.25, 1e6])
def test_clip_by_value(types: Types, limit: float) -> None:
    tensors = draw(types)
    expected = clipped(lambda p: torch.nn.utils.clip_grad_value_(p, limit), tensors)
    assert_same(run([transforms.clip_by_value(limit)], tensors, types), expected, 0.0)


def penalized(
    tensors: dict[str, np.ndarray], penalty: Callable[[str, torch.Tensor], torch.Tensor]
) -> dict[str, np.ndarray]:
    """Gradient of a loss whose own gradient is `.g`, plus the penalty."""
    expected = {}
    for name in SHAPES:
        p = torch.from_numpy(np.array(tensors[name])).requires_grad_()
        loss = (p * torch.from_numpy(np.array(tensors[f"{name}.g"]))).sum() + penalty(name, p)
        (gradient,) = torch.autograd.grad(loss, p)
        expected[name] = gradient.numpy()
    return expected


def test_weight_decay(types: Types) -> None:
    tensors = draw(types)
    expected = penalized(tensors, lambda name, p: 0.125 / 2 * (p**2).sum())
    assert_same(run([transforms.weight_decay(0.125)], tensors, types), expected, TYPES[types["w"]])


@pytest.mark.parametrize("anchor", ["start", "broadcast"])
def test_proximal(types: Types, anchor: Literal["start", "broadcast"]) -> None:
    tensors = draw(types)

    def pull(name: str, p: torch.Tensor) -> torch.Tensor:
        return 0.375 / 2 * ((p - torch.from_numpy(tensors[f"{name}.{anchor}"])) ** 2).sum()

    assert_same(run([transforms.proximal(0.375, anchor)], tensors, types), penalized(tensors, pull), 1e-6)


def test_transforms_follow_one_another(types: Types) -> None:
    tensors = draw(types)
    chain = [transforms.clip_by_value(0.5), transforms.weight_decay(0.25), transforms.clip_by_norm(1.0)]
    once = {**tensors, **{f"{k}.g": v for k, v in run(chain[:1], tensors, types).items()}}
    twice = {**tensors, **{f"{k}.g": v for k, v in run(chain[1:2], once, types).items()}}
    expected = clipped(lambda p: torch.nn.utils.clip_grad_norm_(p, 1.0), twice)
    assert_same(run(chain, tensors, types), expected, TYPES[types["w"]])


def test_numbers_are_hyperparameters(types: Types) -> None:
    tensors = draw(types)
    chain = [
        transforms.clip_by_value(1.0),
        transforms.weight_decay(0.0),
        transforms.proximal(0.0),
        transforms.clip_by_norm(5.0),
    ]
    names = [spec.name for transform in chain for spec in transform.hyperparameters]
    assert names == ["clip_value", "weight_decay", "mu", "clip_norm"]
    given = {"clip_value": 0.5, "weight_decay": 0.25, "mu": 0.125, "clip_norm": 0.75}
    again = [
        transforms.clip_by_value(0.5),
        transforms.weight_decay(0.25),
        transforms.proximal(0.125),
        transforms.clip_by_norm(0.75),
    ]
    found, expected = run(chain, tensors, types, given), run(again, tensors, types)
    assert_same(found, expected, 0.0)
    assert np.abs(found["w"] - run(chain, tensors, types)["w"]).max() > 0.01


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: transforms.clip_by_norm(-1), "clip_by_norm: max_norm must be from 0 to 1e\\+09, is -1"),
        (lambda: transforms.clip_by_value(None), "clip_by_value: limit must be from 0 to 1e\\+09, is None"),
        (lambda: transforms.weight_decay(-0.1), "weight_decay: rate must be from 0 to 1e\\+09, is -0.1"),
        (lambda: transforms.proximal(-0.1), "proximal: mu must be from 0 to 1e\\+09, is -0.1"),
        (lambda: transforms.proximal(0.1, "end"), "proximal: anchor must be 'start' or 'broadcast', is 'end'"),
    ],
)
def test_arguments_are_checked(make: Callable[[], transforms.Transform], message: str) -> None:
    with pytest.raises(TrainingError, match=message):
        make()
