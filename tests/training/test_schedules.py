"""Learning-rate schedules against torch.optim.lr_scheduler."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from torch.optim import lr_scheduler as lrs

from archipel.errors import TrainingError
from archipel.graph import check_model
from archipel.graph.build import Builder
from archipel.training import schedules
from archipel.training.schedules import Schedule

STEPS = 100


def factors(schedule: Schedule, steps: int = STEPS) -> np.ndarray:
    g = ir.Graph([], [], nodes=[], opset_imports={"": 21}, name="schedule")
    op = Builder(g)
    factor = schedule.factor(op, op.input("step", ir.DataType.INT64, []))
    op.name_output(factor, "factor")
    model = ir.Model(g, ir_version=10)
    check_model(model)
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString())
    found = [session.run(None, {"step": np.array(i)})[0] for i in range(steps)]
    assert {(value.dtype.name, value.shape) for value in found} == {("float32", ())}
    return np.array(found, np.float64)


MakeScheduler = Callable[[torch.optim.Optimizer], lrs.LRScheduler]


def rates(make: MakeScheduler, lr: float, steps: int = STEPS) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=lr)
    scheduler = make(optimizer)
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


CASES: dict[str, tuple[Schedule, MakeScheduler]] = {
    "constant": (schedules.constant(0.5), lambda o: lrs.ConstantLR(o, factor=1.0)),
    "step_decay": (schedules.step_decay(0.5, 7, 0.8), lambda o: lrs.StepLR(o, 7, 0.8)),
    "step_decay, gamma 0.1": (schedules.step_decay(0.5, 30), lambda o: lrs.StepLR(o, 30)),
    "exponential": (schedules.exponential(0.5, 0.97), lambda o: lrs.ExponentialLR(o, 0.97)),
    "linear": (
        schedules.linear(0.5, 80, 0.25, 0.75),
        lambda o: lrs.LinearLR(o, start_factor=0.25, end_factor=0.75, total_iters=80),
    ),
    "linear to 0": (schedules.linear(0.5, 60), lambda o: lrs.LinearLR(o, 1.0, 0.0, 60)),
    "polynomial": (schedules.polynomial(0.5, 90, 2.5), lambda o: lrs.PolynomialLR(o, 90, 2.5)),
    "polynomial, power 1": (schedules.polynomial(0.5, 120), lambda o: lrs.PolynomialLR(o, 120)),
    "cosine": (schedules.cosine(0.5, 100), lambda o: lrs.CosineAnnealingLR(o, 100)),
    "cosine, end": (schedules.cosine(0.5, 100, 0.2), lambda o: lrs.CosineAnnealingLR(o, 100, eta_min=0.1)),
    "one_cycle": (schedules.one_cycle(0.5, 100), lambda o: lrs.OneCycleLR(o, 0.5, total_steps=100)),
    "one_cycle, linear": (
        schedules.one_cycle(0.5, 101, 0.453, 10.0, 50.0, "linear"),
        lambda o: lrs.OneCycleLR(o, 0.5, 101, None, None, 0.453, "linear", div_factor=10.0, final_div_factor=50.0),
    ),
    "warmup": (
        schedules.warmup(0.5, 15, 0.1),
        lambda o: lrs.LinearLR(o, start_factor=0.1, total_iters=15),
    ),
    "warmup, then cosine": (
        schedules.warmup(schedules.cosine(0.5, 85, 0.02), 15, 0.2),
        lambda o: lrs.SequentialLR(
            o, [lrs.LinearLR(o, 0.2, total_iters=15), lrs.CosineAnnealingLR(o, 85, eta_min=0.01)], [15]
        ),
    ),
    "warmup, then from another rate": (
        schedules.warmup(schedules.linear(0.5, 50, 0.25, 0.75), 5, 0.5),
        lambda o: lrs.SequentialLR(
            o, [lrs.LinearLR(o, 0.5, total_iters=5), lrs.LinearLR(o, 0.25, 0.75, total_iters=50)], [5]
        ),
    ),
    "warmup, then step_decay": (
        schedules.warmup(schedules.step_decay(0.5, 10, 0.5), 5, 0.5),
        lambda o: lrs.SequentialLR(o, [lrs.LinearLR(o, 0.5, total_iters=5), lrs.StepLR(o, 10, 0.5)], [5]),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_hundred_steps_follow_pytorch(name: str) -> None:
    schedule, make = CASES[name]
    expected = rates(make, 0.5)
    np.testing.assert_allclose(schedule.base * factors(schedule), expected, rtol=1e-6, atol=1e-8)


def test_warmup_starts_at_nothing() -> None:
    assert factors(schedules.warmup(0.5, 4), 6).tolist() == [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]


@pytest.mark.parametrize(
    ("schedule", "last"),
    [
        (schedules.cosine(0.5, 10, 0.25), 0.25),
        (schedules.linear(0.5, 10, 1.0, 0.5), 0.5),
        (schedules.polynomial(0.5, 10, 0.5), 0.0),
        (schedules.one_cycle(0.5, 10, div_factor=4.0, final_div_factor=2.0), 0.125),
    ],
)
def test_the_last_value_stays(schedule: Schedule, last: float) -> None:
    np.testing.assert_allclose(factors(schedule, 25)[10:], last, rtol=1e-6, atol=1e-8)


def test_a_power_keeps_its_digits_over_many_steps() -> None:
    g = ir.Graph([], [], nodes=[], opset_imports={"": 21}, name="schedule")
    op = Builder(g)
    op.name_output(schedules.exponential(0.1, 0.9999).factor(op, op.input("step", ir.DataType.INT64, [])), "factor")
    session = onnxruntime.InferenceSession(ir.to_proto(ir.Model(g, ir_version=10)).SerializeToString())
    assert session.run(None, {"step": np.array(50_000)})[0] == pytest.approx(0.9999**50_000, rel=1e-6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: schedules.constant(101), "constant: lr must be from 0 to 100, is 101"),
        (lambda: schedules.step_decay(0.1, 0), "step_decay: every must be a whole number of 1 or more, is 0"),
        (lambda: schedules.step_decay(0.1, 2, 0.0), "step_decay: gamma must be above 0, is 0.0"),
        (lambda: schedules.exponential(0.1, -1), "exponential: gamma must be above 0, is -1"),
        (lambda: schedules.linear(0.1, 1.5), "linear: steps must be a whole number of 1 or more, is 1.5"),
        (lambda: schedules.linear(0.1, 5, -0.1), "linear: start must be at least 0, is -0.1"),
        (lambda: schedules.polynomial(0.1, 5, 0), "polynomial: power must be above 0, is 0"),
        (lambda: schedules.cosine(0.1, True), "cosine: steps must be a whole number of 1 or more, is True"),
        (lambda: schedules.warmup("0.1", 5), "warmup: lr must be from 0 to 100, is '0.1'"),
        (lambda: schedules.one_cycle(0.1, 10, 0.1), "one_cycle: pct_start must be above 0.1 and below 1, is 0.1"),
        (lambda: schedules.one_cycle(0.1, 10, anneal="exp"), "one_cycle: anneal must be 'cos' or 'linear', is 'exp'"),
    ],
)
def test_arguments_are_checked(make: Callable[[], Schedule], message: str) -> None:
    with pytest.raises(TrainingError, match=message):
        make()
