"""Optimizers against torch.optim, on a small regression."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from torch.nn import functional as F

from archipel.autodiff import differentiate
from archipel.errors import TrainingError
from archipel.graph import check_model
from archipel.graph.build import Builder
from archipel.graph.passes import remove_dead_code, share_subexpressions
from archipel.training import losses, optimizers, schedules

STEPS = 20
RATE = 0.0625  # a float32 holds it exactly, as hyperparameters are


@dataclass
class Context:
    """What a step graph would hand to the optimizer."""

    op: Builder
    hyperparameters: dict[str, ir.Value] = field(default_factory=dict)
    asked: dict[str, ir.Value] = field(default_factory=dict)

    def step(self) -> ir.Value:
        if "step" not in self.asked:
            self.asked["step"] = self.op.input("step", ir.DataType.INT64, [])
        return self.asked["step"]

    def anchor(self, parameter: ir.Value, kind: str) -> ir.Value:
        raise AssertionError("no optimizer asks for an anchor")


def step(optimizer: optimizers.Optimizer, dtype: npt.DTypeLike, layers: int = 1) -> ir.Model:
    """x @ w + b, with a squared error, `layers` times: outputs `<parameter>.next`, `<parameter>.<state>.next`."""
    kind = ir.DataType.from_numpy(np.dtype(dtype))
    g = ir.Graph([], [], nodes=[], opset_imports={"": 21}, name="step")
    op = Builder(g)
    value, label = op.input("x", kind, [8, 4]), op.input("y", kind, [8, 4])
    parameters = []
    for i in range(layers):
        w, b = op.input(f"w{i}", kind, [4, 4]), op.input(f"b{i}", kind, [4])
        parameters += [w, b]
        value = op.Add(op.MatMul(value, w), b)
    objective = losses.objective(op, losses.mse(), value, label)
    gradients = differentiate(op, {objective: op.constant(np.ones((), dtype))}, parameters)
    context = Context(op, {s.name: op.input(s.name, ir.DataType.FLOAT, []) for s in optimizer.hyperparameters})
    results = {}
    for parameter, gradient in zip(parameters, gradients):
        sizes = [int(d) for d in parameter.shape]
        state = {s.name: op.input(f"{parameter.name}.{s.name}", kind, sizes) for s in optimizer.init()}
        updated = optimizer.update(op, parameter, gradient, state, context)
        assert set(updated.state) == set(state)
        results[parameter.name] = updated.parameter
        results |= {f"{parameter.name}.{name}": kept for name, kept in updated.state.items()}
    for name, result in results.items():
        op.name_output(result, f"{name}.next")
    model = ir.Model(g, ir_version=10)
    remove_dead_code(model)
    share_subexpressions(model)
    check_model(model)
    return model


def batches(dtype: npt.DTypeLike) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(1)
    return [(rng.standard_normal((8, 4)).astype(dtype), rng.standard_normal((8, 4)).astype(dtype)) for _ in range(20)]


def first(dtype: npt.DTypeLike) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(2)
    return {"w0": rng.standard_normal((4, 4)).astype(dtype), "b0": rng.standard_normal(4).astype(dtype)}


def ours(optimizer: optimizers.Optimizer, dtype: npt.DTypeLike) -> list[dict[str, np.ndarray]]:
    session = onnxruntime.InferenceSession(ir.to_proto(step(optimizer, dtype)).SerializeToString())
    inputs = {port.name: port.shape for port in session.get_inputs()}
    tensors = first(dtype)
    for name in ("w0", "b0"):
        for spec in optimizer.init():
            tensors[f"{name}.{spec.name}"] = np.full(tensors[name].shape, spec.init, dtype)
    scalars = {spec.name: np.array(spec.default, np.float32) for spec in optimizer.hyperparameters}
    names = [port.name for port in session.get_outputs()]
    found = []
    for i, (x, y) in enumerate(batches(dtype)):
        feed = {"x": x, "y": y, "step": np.array(i), **scalars, **tensors}
        results = session.run(names, {name: value for name, value in feed.items() if name in inputs})
        tensors = {name.removesuffix(".next"): result for name, result in zip(names, results)}
        assert all(value.dtype == dtype for value in tensors.values())
        found.append(tensors)
    return found


def theirs(
    make: Callable[..., torch.optim.Optimizer], dtype: npt.DTypeLike, scheduler: Callable | None = None
) -> list[dict[str, np.ndarray]]:
    tensors = {name: torch.from_numpy(value).requires_grad_() for name, value in first(dtype).items()}
    optimizer = make(tensors.values())
    schedule = None if scheduler is None else scheduler(optimizer)
    found = []
    for x, y in batches(dtype):
        optimizer.zero_grad()
        F.mse_loss(torch.from_numpy(x) @ tensors["w0"] + tensors["b0"], torch.from_numpy(y)).backward()
        optimizer.step()
        if schedule is not None:
            schedule.step()
        found.append({name: value.detach().numpy().copy() for name, value in tensors.items()})
    return found


CASES: list[tuple[str, dict[str, Any]]] = [
    ("sgd", {}),
    ("sgd", {"weight_decay": 0.1}),
    ("sgd", {"momentum": 0.9}),
    ("sgd", {"momentum": 0.9, "weight_decay": 0.1}),
    ("sgd", {"momentum": 0.9, "dampening": 0.25}),
    ("sgd", {"momentum": 0.5, "dampening": 1.0, "weight_decay": 0.1}),
    ("sgd", {"momentum": 0.9, "nesterov": True}),
    ("sgd", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    ("adam", {}),
    ("adam", {"betas": (0.8, 0.9), "eps": 1e-3}),
    ("adam", {"betas": (0.0, 0.0), "eps": 1e-3}),
    ("adam", {"weight_decay": 0.1}),
    ("adam", {"amsgrad": True, "betas": (0.9, 0.5)}),
    ("adamw", {}),
    ("adamw", {"weight_decay": 0.0}),
    ("adamw", {"weight_decay": 0.5, "amsgrad": True, "betas": (0.7, 0.6), "eps": 1e-4}),
    ("adagrad", {}),
    ("adagrad", {"lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.25, "eps": 1e-3}),
    ("rmsprop", {}),
    ("rmsprop", {"alpha": 0.9, "eps": 1e-3, "weight_decay": 0.1}),
    ("rmsprop", {"momentum": 0.9}),
    ("rmsprop", {"alpha": 0.0, "momentum": 0.5}),
    ("rmsprop", {"centered": True, "eps": 1e-3}),
    ("rmsprop", {"centered": True, "momentum": 0.9, "weight_decay": 0.1, "alpha": 0.8, "eps": 1e-2}),
]
TORCH = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
}


def assert_same(found: list[dict], expected: list[dict], tolerance: float) -> None:
    assert len(found) == len(expected) == STEPS
    for mine, reference in zip(found, expected):
        for name, value in reference.items():
            np.testing.assert_allclose(mine[name], value, rtol=0, atol=tolerance * np.abs(value).max())


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float64, 1e-6), (np.float32, 1e-5)], ids=["float64", "float32"])
@pytest.mark.parametrize(("name", "arguments"), CASES, ids=lambda part: str(part))
@pytest.mark.sampled(every=6)
def test_twenty_steps_follow_pytorch(
    name: str, arguments: dict[str, Any], dtype: npt.DTypeLike, tolerance: float
) -> None:
    optimizer = getattr(optimizers, name)(lr=RATE, **arguments)
    found = ours(optimizer, dtype)
    assert_same(found, theirs(lambda values: TORCH[name](values, lr=RATE, **arguments), dtype), tolerance)


@pytest.mark.parametrize("name", TORCH)
def test_defaults_are_pytorchs(name: str) -> None:
    arguments = {"lr": 0.01} if name == "sgd" else {}  # 0.001 in PyTorch
    expected = theirs(lambda values: TORCH[name](values, **arguments), np.float32)
    assert_same(ours(getattr(optimizers, name)(), np.float32), expected, 1e-5)


@pytest.mark.parametrize("name", TORCH)
def test_a_schedule_sets_the_rate_of_each_step(name: str) -> None:
    optimizer = getattr(optimizers, name)(lr=schedules.warmup(schedules.step_decay(RATE, 4, 0.5), 5, 0.25))
    (spec,) = optimizer.hyperparameters
    assert (spec.name, spec.default) == ("lr", RATE)

    def scheduler(o: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        parts = [torch.optim.lr_scheduler.LinearLR(o, 0.25, total_iters=5), torch.optim.lr_scheduler.StepLR(o, 4, 0.5)]
        return torch.optim.lr_scheduler.SequentialLR(o, parts, [5])

    expected = theirs(lambda values: TORCH[name](values, lr=RATE), np.float64, scheduler)
    assert_same(ours(optimizer, np.float64), expected, 1e-6)


def test_a_centered_variance_of_nothing_is_not_negative() -> None:
    """With the same gradient in every step, its variance is 0 up to rounding, on either side of 0."""
    optimizer = optimizers.rmsprop(alpha=0.9, centered=True, eps=1e-2)
    g = ir.Graph([], [], nodes=[], opset_imports={"": 21}, name="update")
    op = Builder(g)
    p, gradient, squares, sums = (op.input(name, ir.DataType.FLOAT, [1000]) for name in ("p", "g", "s", "u"))
    context = Context(op, {"lr": op.input("lr", ir.DataType.FLOAT, [])})
    updated = optimizer.update(op, p, gradient, {"square_sum": squares, "gradient_sum": sums}, context)
    for name, value in (("p.next", updated.parameter), *((f"{k}.next", v) for k, v in updated.state.items())):
        op.name_output(value, name)
    session = onnxruntime.InferenceSession(ir.to_proto(ir.Model(g, ir_version=10)).SerializeToString())
    fixed = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    feed = {"p": fixed, "g": fixed, "s": np.zeros(1000, np.float32), "u": np.zeros(1000, np.float32)}
    for _ in range(300):
        names = ["p.next", "square_sum.next", "gradient_sum.next"]
        found = session.run(names, {**feed, "lr": np.array(0.001, np.float32)})
        feed |= dict(zip(("p", "s", "u"), found))
        assert np.isfinite(feed["p"]).all()


@pytest.mark.parametrize(
    ("optimizer", "nodes"),
    [
        (optimizers.sgd(), 2),
        (optimizers.sgd(weight_decay=0.1), 3),
        (optimizers.sgd(momentum=0.9), 4),
        (optimizers.sgd(momentum=0.9, nesterov=True), 6),
        (optimizers.adam(), 10),
        (optimizers.adam(lr=schedules.cosine(0.1, 10)), 10),
        (optimizers.adamw(), 11),
        (optimizers.adagrad(lr_decay=0.1), 7),
        (optimizers.rmsprop(), 8),
    ],
    ids=str,
)
def test_what_parameters_share_is_computed_once(optimizer: optimizers.Optimizer, nodes: int) -> None:
    """Each further parameter costs its own arithmetic only: one operator more is one kernel more to start."""

    def size(layers: int) -> int:
        return sum(1 for _ in step(optimizer, np.float32, layers).graph)

    plain = sum(1 for _ in step(Still(), np.float32, 3).graph) - sum(1 for _ in step(Still(), np.float32, 2).graph)
    assert size(3) - size(2) == plain + 2 * (nodes - 1)


class Still:
    """One operator: takes the gradient for the parameter."""

    hyperparameters: tuple = ()

    def init(self) -> tuple:
        return ()

    def update(self, op: Builder, parameter: ir.Value, gradient: ir.Value, *_: object) -> optimizers.Updated:
        return optimizers.Updated(op.Neg(gradient), {})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: optimizers.sgd(momentum=1.0), "sgd: momentum must be at least 0 and below 1, is 1.0"),
        (lambda: optimizers.sgd(lr=-1), "sgd: lr must be from 0 to 100, is -1"),
        (lambda: optimizers.sgd(dampening=2), "sgd: dampening must be from 0 to 1, is 2"),
        (lambda: optimizers.sgd(nesterov=True), "nesterov needs momentum and no dampening, got 0.0 and 0.0"),
        (lambda: optimizers.sgd(0.9, nesterov=True, dampening=0.5), "no dampening, got 0.9 and 0.5"),
        (lambda: optimizers.sgd(weight_decay=-1), "sgd: weight_decay must be at least 0, is -1"),
        (lambda: optimizers.adam(lr=None), "adam: lr must be from 0 to 100, is None"),
        (lambda: optimizers.adam(betas=(0.9, 1.0)), r"adam: betas\[1\] must be at least 0 and below 1, is 1.0"),
        (lambda: optimizers.adamw(betas=(0.9,)), r"adamw: betas must be two numbers, is \(0.9,\)"),
        (lambda: optimizers.adamw(betas=0.9), "adamw: betas must be two numbers, is 0.9"),
        (lambda: optimizers.adamw(eps=-1e-8), "adamw: eps must be at least 0, is -1e-08"),
        (lambda: optimizers.adagrad(lr_decay=-1), "adagrad: lr_decay must be at least 0, is -1"),
        (lambda: optimizers.rmsprop(alpha=1), "rmsprop: alpha must be at least 0 and below 1, is 1"),
        (lambda: optimizers.rmsprop(momentum=-1), "rmsprop: momentum must be at least 0, is -1"),
    ],
)
def test_arguments_are_checked(make: Callable[[], optimizers.Optimizer], message: str) -> None:
    with pytest.raises(TrainingError, match=message):
        make()
