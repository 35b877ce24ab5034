"""Optimizers and schedules on PyTorch against the step graph on ONNX Runtime."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch

from archipel.graph import Builder, Model
from archipel.graph.opset import IR_VERSION, OPSET
from archipel.graph.shapes import dtype_of
from archipel.training import losses, optimizers, schedules, step_graph
from archipel.training.cloud.optimizers import Rates, make_torch_optimizer
from archipel.training.driver import StepRunner
from archipel.training.optimizers import Descent, Updated

STEPS = 50


@dataclass(frozen=True)
class Lion(Descent):
    """Chen et al. 2023: an optimizer that PyTorch does not have."""

    def init(self) -> tuple[optimizers.StateSpec, ...]:
        return (optimizers.StateSpec("momentum"),)

    def update(
        self, op: Builder, parameter: ir.Value, gradient: ir.Value, state: Mapping[str, ir.Value], context: Any
    ) -> Updated:
        kept = state["momentum"]
        direction = op.Sign(op.Add(op.Mul(kept, 0.9), op.Mul(gradient, 0.1)))
        rate = self.rate(op, context, dtype_of(parameter))
        return Updated(
            op.Sub(parameter, op.Mul(direction, rate)),
            {"momentum": op.Add(op.Mul(kept, 0.99), op.Mul(gradient, 0.01))},
        )


CASES = {
    "sgd": optimizers.sgd(lr=0.125),
    "sgd-decay": optimizers.sgd(lr=0.125, weight_decay=0.1),
    "momentum": optimizers.sgd(0.9, dampening=0.3, weight_decay=0.01, lr=0.125),
    "nesterov": optimizers.sgd(0.9, nesterov=True, lr=schedules.warmup(schedules.cosine(0.125, steps=40), 5)),
    "adam": optimizers.adam(lr=0.0625, weight_decay=0.01),
    "amsgrad": optimizers.adam(lr=0.0625, amsgrad=True),
    "adamw": optimizers.adamw(lr=schedules.one_cycle(0.0625, 50), weight_decay=0.1),
    "adagrad": optimizers.adagrad(lr=0.125, lr_decay=0.01, weight_decay=0.01, initial_accumulator_value=0.1),
    "rmsprop": optimizers.rmsprop(lr=0.0625, weight_decay=0.01),
    "rmsprop-centered": optimizers.rmsprop(lr=0.0625, momentum=0.5, centered=True),
    "own": Lion(schedules.linear(0.03125, 30), 0.0),
}


def line(rng: np.random.Generator) -> Model:
    """x @ w + b in float64."""
    graph = ir.Graph([], [], nodes=[], opset_imports={"": OPSET}, name="line")
    op = Builder(graph)
    x = op.input("x", ir.DataType.DOUBLE, ["batch", 4])
    w, b = op.initializer("w", rng.normal(size=(4, 3))), op.initializer("b", rng.normal(size=3))
    op.name_output(op.Add(op.MatMul(x, w), b), "y")
    return Model(ir.Model(graph, ir_version=IR_VERSION))


@pytest.mark.parametrize("case", CASES)
def test_fifty_steps_are_those_of_the_step_graph_in_float64(case: str) -> None:
    optimizer, rng = CASES[case], np.random.default_rng(0)
    model = line(rng)
    runner = StepRunner(step_graph(model, losses.mse(), optimizer))
    w, b = (torch.from_numpy(model.parameters[name].copy()).requires_grad_() for name in ("w", "b"))
    made = make_torch_optimizer(optimizer, [w, b], "all", torch.device("cpu"))  # type: ignore[list-item]
    rates = Rates(optimizer)
    for step in range(STEPS):
        x, y = rng.normal(size=(8, 4)), rng.normal(size=(8, 3))
        runner.step((x, y))
        made.zero_grad()
        torch.nn.functional.mse_loss(torch.from_numpy(x) @ w + b, torch.from_numpy(y)).backward()
        for group in made.param_groups:
            group["lr"] = rates.at(step)
        made.step()
    for name, value in (("w", w), ("b", b)):
        np.testing.assert_allclose(value.detach().numpy(), runner.tensors[name], rtol=1e-6, atol=1e-9)


def test_an_optimizer_of_its_own_resumes_from_its_state() -> None:
    def run(break_at: int) -> torch.Tensor:
        rng = np.random.default_rng(1)
        p = torch.nn.Parameter(torch.from_numpy(rng.normal(size=5)))
        made = make_torch_optimizer(CASES["own"], [p], "all", torch.device("cpu"))
        for step in range(10):
            if step == break_at:
                state = made.state_dict()
                made = make_torch_optimizer(CASES["own"], [p], "all", torch.device("cpu"))
                made.load_state_dict(state)
            made.param_groups[0]["lr"] = 0.1
            p.grad = torch.from_numpy(rng.normal(size=5))
            made.step()
        return p.detach()

    assert torch.equal(run(4), run(-1))


def test_decay_may_spare_biases_and_normalizations() -> None:
    matrix, bias = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2))
    made = make_torch_optimizer(optimizers.adamw(lr=0.5, weight_decay=0.5), [matrix, bias], "matrices",
                                torch.device("cpu"))  # fmt: skip
    matrix.grad, bias.grad = torch.zeros(2, 2), torch.zeros(2)
    made.step()
    assert torch.equal(matrix.detach(), torch.full((2, 2), 0.75))
    assert torch.equal(bias.detach(), torch.ones(2))


@pytest.mark.parametrize(
    "schedule",
    [schedules.cosine(0.1, 2000, end=0.1), schedules.warmup(schedules.exponential(0.1, 0.999), 700),
     schedules.constant(0.3)],
)  # fmt: skip
def test_rates_are_those_of_the_schedule_beyond_one_chunk(schedule: schedules.Schedule) -> None:
    rates = Rates(optimizers.sgd(lr=schedule))
    step = step_graph(line(np.random.default_rng(0)), losses.mse(), optimizers.sgd(lr=schedule))
    for number in (0, 1, 699, 1023, 1024, 1999, 2500):
        runner = StepRunner(step)
        before = {name: value.copy() for name, value in runner.tensors.items()}
        runner.resume(before, number)
        x, y = np.eye(4), np.zeros((4, 3))
        runner.step((x, y))
        gradient = (2 / 12) * (x.T @ (x @ before["w"] + before["b"] - y))
        used = (before["w"] - runner.tensors["w"]) / gradient
        np.testing.assert_allclose(used, rates.at(number), rtol=1e-6)
