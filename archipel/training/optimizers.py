"""Optimizers as graphs: what state a parameter needs, and how one step changes both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import onnx_ir as ir

from archipel.errors import TrainingError
from archipel.graph.build import Builder
from archipel.graph.shapes import dtype_of


@dataclass(frozen=True)
class HyperparameterSpec:
    """A scalar float32 input that the plan may set within [minimum, maximum]."""

    name: str
    default: float
    minimum: float
    maximum: float


@dataclass(frozen=True)
class StateSpec:
    """A tensor `<parameter>.<name>` kept between steps: the parameter's shape and type, filled with `init`."""

    name: str
    init: float = 0.0


@dataclass(frozen=True)
class Updated:
    """New values of a parameter and of its state, by the state's name."""

    parameter: ir.Value
    state: Mapping[str, ir.Value]


class Optimizer(Protocol):
    """An init/update pair. `update` is asked once for each parameter, with the graph's own values."""

    @property
    def hyperparameters(self) -> tuple[HyperparameterSpec, ...]: ...

    def init(self) -> tuple[StateSpec, ...]:
        """The state of one parameter."""

    def update(
        self,
        op: Builder,
        parameter: ir.Value,
        gradient: ir.Value,
        state: Mapping[str, ir.Value],
        hyperparameters: Mapping[str, ir.Value],
    ) -> Updated:
        """Emit one step for one parameter."""


@dataclass(frozen=True)
class SGD:
    """Gradient descent; with momentum m: v' = m v + g, p' = p - lr v' (Sutskever et al. 2013, in PyTorch's form)."""

    momentum: float = 0.0
    lr: float = 0.01

    @property
    def hyperparameters(self) -> tuple[HyperparameterSpec, ...]:
        return (HyperparameterSpec("lr", self.lr, 0.0, 100.0),)

    def init(self) -> tuple[StateSpec, ...]:
        return (StateSpec("momentum"),) if self.momentum else ()

    def update(
        self,
        op: Builder,
        parameter: ir.Value,
        gradient: ir.Value,
        state: Mapping[str, ir.Value],
        hyperparameters: Mapping[str, ir.Value],
    ) -> Updated:
        direction = gradient
        if self.momentum:
            direction = op.Add(op.Mul(state["momentum"], float(self.momentum)), gradient)
        rate = hyperparameters["lr"]
        if dtype_of(rate) != dtype_of(parameter):
            rate = op.Cast(rate, to=int(dtype_of(parameter)))
        moved = op.Sub(parameter, op.Mul(direction, rate))
        return Updated(moved, {"momentum": direction} if self.momentum else {})


def sgd(momentum: float = 0.0, *, lr: float = 0.01) -> SGD:
    """Stochastic gradient descent. `momentum` is fixed in the graph, `lr` is the default of its hyperparameter."""
    if not 0.0 <= momentum < 1.0:
        raise TrainingError(f"sgd: momentum must be at least 0 and below 1, is {momentum}")
    if not 0.0 <= lr <= 100.0:
        raise TrainingError(f"sgd: lr must be from 0 to 100, is {lr}")
    return SGD(momentum, lr)
