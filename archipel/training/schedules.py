"""Learning-rate schedules as graphs of the step count.

A schedule multiplies the hyperparameter `lr`, so that setting `lr` at run time scales the whole schedule. After its
last step a schedule keeps its last value. Steps are counted from 0 in each round.

In the functions `lr` is a number from 0 to 100 and `steps` 1 or more; they raise TrainingError for a wrong number. All
return a Schedule, which an optimizer takes as its `lr`: optimizers.sgd(lr=schedules.cosine(0.1, steps=500)).

Example:
    optimizer = optimizers.sgd(lr=schedules.warmup(schedules.cosine(0.1, steps=500), steps=20))
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import numpy as np
import onnx_ir as ir

from archipel.errors import TrainingError
from archipel.graph.build import Builder
from archipel.training.arguments import number, whole

MAXIMUM_RATE = 100.0


@dataclass(frozen=True)
class Schedule(ABC):
    """`base` is the default of the hyperparameter `lr`, `factor` what it is multiplied with in each step."""

    base: float

    def factor(self, op: Builder, step: ir.Value) -> ir.Value:
        """The factor in step `step` (int64 scalar), a float32 scalar."""
        # In float64: the power of a float32 near 1 multiplies its rounding error by the number of steps.
        exact = self.at(op, op.Cast(step, to=int(ir.DataType.DOUBLE)))
        return op.Cast(exact, to=int(ir.DataType.FLOAT))

    @abstractmethod
    def at(self, op: Builder, time: ir.Value) -> ir.Value:
        """The factor at `time` steps; both float64 scalars."""


@dataclass(frozen=True)
class Constant(Schedule):
    """1 in every step."""

    def factor(self, op: Builder, step: ir.Value) -> ir.Value:
        return op.constant(np.ones((), np.float32))

    def at(self, op: Builder, time: ir.Value) -> ir.Value:
        return op.constant(np.ones((), np.float64))


@dataclass(frozen=True)
class Exponential(Schedule):
    """gamma^floor(t / every)."""

    gamma: float
    every: int = 1

    def at(self, op: Builder, time: ir.Value) -> ir.Value:
        periods = time if self.every == 1 else op.Floor(op.Div(time, float(self.every)))
        return op.Pow(_number(op, self.gamma), periods)


@dataclass(frozen=True)
class Linear(Schedule):
    """From `start` to `end` along a straight line."""

    steps: int
    start: float
    end: float

    def at(self, op: Builder, time: ir.Value) -> ir.Value:
        slope = (self.end - self.start) / self.steps  # Min: after the last step the time stands still
        return op.Add(op.Mul(op.Min(time, float(self.steps)), slope), self.start)


@dataclass(frozen=True)
class Polynomial(Schedule):
    """(1 - t / steps)^power."""

    steps: int
    power: float

    def at(self, op: Builder, time: ir.Value) -> ir.Value:
        left = op.Sub(1.0, op.Div(op.Min(time, float(self.steps)), float(self.steps)))
        return op.Pow(left, self.power)


@dataclass(frozen=True)
class Cosine(Schedule):
    """From 1 to `end` along half a period of a cosine."""

    steps: int
    end: float

    def at(self, op: Builder, time: ir.Value) -> ir.Value:
        return _anneal(op, op.Div(op.Min(time, float(self.steps)), float(self.steps)), 1.0, self.end)


@dataclass(frozen=True)
class Warmup(Schedule):
    """From `start` to 1 along a straight line, then `schedule` from its step 0 on."""

    schedule: Schedule
    steps: int
    start: float

    def at(self, op: Builder, time: ir.Value) -> ir.Value:
        rising = Linear(self.base, self.steps, self.start, 1.0).at(op, time)
        # Where computes both branches: the time of the later one must not be negative.
        later = self.schedule.at(op, op.Max(op.Sub(time, float(self.steps)), 0.0))
        return op.Where(op.Less(time, float(self.steps)), rising, later)


@dataclass(frozen=True)
class OneCycle(Schedule):
    """From `start` up to 1 in the first share `rise` of the steps, then down to `end`."""

    steps: int
    rise: float
    start: float
    end: float
    anneal: Literal["cos", "linear"]

    def at(self, op: Builder, time: ir.Value) -> ir.Value:
        # The highest rate is at step `peak`, which need not be a whole number, the lowest at the last step.
        peak, last = self.rise * self.steps - 1.0, self.steps - 1.0
        line = _anneal if self.anneal == "cos" else _straight
        up = line(op, op.Div(time, peak), self.start, 1.0)
        down = line(op, op.Div(op.Sub(op.Min(time, last), peak), last - peak), 1.0, self.end)
        return op.Where(op.LessOrEqual(time, peak), up, down)


def constant(lr: float) -> Constant:
    """The same rate in every step."""
    return Constant(_rate("constant", lr))


def step_decay(lr: float, every: int, gamma: float = 0.1) -> Exponential:
    """lr, multiplied by `gamma` after each `every` steps (PyTorch's StepLR)."""
    rate = _rate("step_decay", lr)
    return Exponential(rate, number("step_decay", "gamma", gamma, ends="(]"), whole("step_decay", "every", every, 1))


def exponential(lr: float, gamma: float) -> Exponential:
    """lr, multiplied by `gamma` after each step (ExponentialLR)."""
    return Exponential(_rate("exponential", lr), number("exponential", "gamma", gamma, ends="(]"))


def linear(lr: float, steps: int, start: float = 1.0, end: float = 0.0) -> Linear:
    """From `start` times lr to `end` times lr in `steps` steps (LinearLR)."""
    return Linear(
        _rate("linear", lr),
        whole("linear", "steps", steps, 1),
        number("linear", "start", start),
        number("linear", "end", end),
    )


def polynomial(lr: float, steps: int, power: float = 1.0) -> Polynomial:
    """lr (1 - t / steps)^power (PolynomialLR)."""
    return Polynomial(
        _rate("polynomial", lr), whole("polynomial", "steps", steps, 1), number("polynomial", "power", power, ends="(]")
    )


def cosine(lr: float, steps: int, end: float = 0.0) -> Cosine:
    """From lr to `end` times lr in `steps` steps (CosineAnnealingLR; Loshchilov and Hutter 2017, without restarts)."""
    return Cosine(_rate("cosine", lr), whole("cosine", "steps", steps, 1), number("cosine", "end", end))


def warmup(schedule: float | Schedule, steps: int, start: float = 0.0) -> Warmup:
    """From `start` times lr to lr in `steps` steps, then the schedule from its beginning (LinearLR in SequentialLR).

    A number stands for a constant schedule.
    """
    then = schedule if isinstance(schedule, Schedule) else Constant(_rate("warmup", schedule))
    return Warmup(then.base, then, whole("warmup", "steps", steps, 1), number("warmup", "start", start))


def one_cycle(
    lr: float,
    steps: int,
    pct_start: float = 0.3,
    div_factor: float = 25.0,
    final_div_factor: float = 1e4,
    anneal: Literal["cos", "linear"] = "cos",
) -> OneCycle:
    """From lr / div_factor to lr in the share `pct_start` of the steps, then to lr / (div_factor final_div_factor).

    OneCycleLR in two phases, with lr for its max_lr (Smith and Topin 2018).
    """
    steps = whole("one_cycle", "steps", steps, 1)
    # Above 1 / steps, so that the peak, at rise * steps - 1, comes after step 0.
    rise = number("one_cycle", "pct_start", pct_start, 1.0 / steps, 1.0, ends="()")
    start = 1.0 / number("one_cycle", "div_factor", div_factor, ends="(]")
    end = start / number("one_cycle", "final_div_factor", final_div_factor, ends="(]")
    if anneal not in ("cos", "linear"):
        raise TrainingError(f"one_cycle: anneal must be 'cos' or 'linear', is {anneal!r}")
    return OneCycle(_rate("one_cycle", lr), steps, rise, start, end, anneal)


def _rate(function: str, lr: float) -> float:
    return number(function, "lr", lr, 0.0, MAXIMUM_RATE)


def _number(op: Builder, value: float) -> ir.Value:
    return op.constant(np.array(value, np.float64))


def _anneal(op: Builder, progress: ir.Value, start: float, end: float) -> ir.Value:
    """Along half a period of a cosine, for a progress from 0 to 1."""
    wave = op.Mul(op.Add(op.Cos(op.Mul(progress, math.pi)), 1.0), (start - end) / 2)
    return op.Add(wave, end)


def _straight(op: Builder, progress: ir.Value, start: float, end: float) -> ir.Value:
    return op.Add(op.Mul(progress, end - start), start)
