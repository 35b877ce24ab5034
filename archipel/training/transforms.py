"""Gradient transforms: they change the gradients before the optimizer gets them, in the order of the list.

The functions make transforms for `step_graph(..., transforms=[transforms.clip_by_norm(1.0)])`. Their numbers are
defaults of hyperparameters, from 0 to 10^9; they raise TrainingError for others.

Example:
    changes = [transforms.weight_decay(1e-4), transforms.clip_by_norm(1.0)]
    step = archipel.training.step_graph(model, losses.cross_entropy(), optimizers.sgd(lr=0.1), transforms=changes)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import onnx_ir as ir

from archipel.errors import TrainingError
from archipel.graph.build import Builder
from archipel.graph.shapes import dtype_of
from archipel.training.arguments import number
from archipel.training.context import Anchor, StepContext
from archipel.training.optimizers import HyperparameterSpec, cast

LARGEST = 1e9


class Transform(Protocol):
    """Changes all gradients of a step together."""

    @property
    def hyperparameters(self) -> tuple[HyperparameterSpec, ...]: ...

    def apply(
        self, op: Builder, parameters: Sequence[ir.Value], gradients: Sequence[ir.Value], context: StepContext
    ) -> list[ir.Value]:
        """New gradients, one for each parameter, in the gradients' shapes and types."""


@dataclass(frozen=True)
class ClipByNorm:
    """g min(1, clip_norm / (|all g| + 1e-6)), |.| the 2-norm of all gradients together (Pascanu et al. 2013)."""

    max_norm: float

    @property
    def hyperparameters(self) -> tuple[HyperparameterSpec, ...]:
        return (HyperparameterSpec("clip_norm", self.max_norm, 0.0, LARGEST),)

    def apply(
        self, op: Builder, parameters: Sequence[ir.Value], gradients: Sequence[ir.Value], context: StepContext
    ) -> list[ir.Value]:
        norm = global_norm(op, gradients)  # of all together, so that their direction stays
        limit = cast(op, context.hyperparameters["clip_norm"], dtype_of(norm))
        scale = op.Min(op.Div(limit, op.Add(norm, 1e-6)), 1.0)  # 1e-6 as in PyTorch's clip_grad_norm_
        return [op.Mul(g, cast(op, scale, dtype_of(g))) for g in gradients]


@dataclass(frozen=True)
class ClipByValue:
    """Each element into [-clip_value, clip_value]."""

    limit: float

    @property
    def hyperparameters(self) -> tuple[HyperparameterSpec, ...]:
        return (HyperparameterSpec("clip_value", self.limit, 0.0, LARGEST),)

    def apply(
        self, op: Builder, parameters: Sequence[ir.Value], gradients: Sequence[ir.Value], context: StepContext
    ) -> list[ir.Value]:
        limits = [cast(op, context.hyperparameters["clip_value"], dtype_of(g)) for g in gradients]
        return [op.Clip(g, op.Neg(limit), limit) for g, limit in zip(gradients, limits)]


@dataclass(frozen=True)
class WeightDecay:
    """g + weight_decay p."""

    rate: float

    @property
    def hyperparameters(self) -> tuple[HyperparameterSpec, ...]:
        return (HyperparameterSpec("weight_decay", self.rate, 0.0, LARGEST),)

    def apply(
        self, op: Builder, parameters: Sequence[ir.Value], gradients: Sequence[ir.Value], context: StepContext
    ) -> list[ir.Value]:
        rate = context.hyperparameters["weight_decay"]
        return [op.Add(g, op.Mul(p, cast(op, rate, dtype_of(p)))) for p, g in zip(parameters, gradients)]


@dataclass(frozen=True)
class Proximal:
    """g + mu (p - anchor), the gradient of mu / 2 |p - anchor|^2 (FedProx, Li et al. 2020, section 3)."""

    mu: float
    anchor: Anchor
    name: str = "mu"

    @property
    def hyperparameters(self) -> tuple[HyperparameterSpec, ...]:
        return (HyperparameterSpec(self.name, self.mu, 0.0, LARGEST),)

    def apply(
        self, op: Builder, parameters: Sequence[ir.Value], gradients: Sequence[ir.Value], context: StepContext
    ) -> list[ir.Value]:
        mu = context.hyperparameters[self.name]
        results = []
        for p, g in zip(parameters, gradients):
            away = op.Sub(p, context.anchor(p, self.anchor))
            results.append(op.Add(g, op.Mul(away, cast(op, mu, dtype_of(p)))))
        return results


@dataclass(frozen=True)
class Correction:
    """g + c, with the round state `name`/PARAMETER as c (SCAFFOLD, Karimireddy et al. 2020)."""

    name: str

    @property
    def hyperparameters(self) -> tuple[HyperparameterSpec, ...]:
        return ()

    def apply(
        self, op: Builder, parameters: Sequence[ir.Value], gradients: Sequence[ir.Value], context: StepContext
    ) -> list[ir.Value]:
        return [op.Add(g, context.state(p, self.name)) for p, g in zip(parameters, gradients)]


def clip_by_norm(max_norm: float) -> ClipByNorm:
    """Scale all gradients down together, to a 2-norm of at most `max_norm`, the default of hyperparameter clip_norm."""
    return ClipByNorm(number("clip_by_norm", "max_norm", max_norm, 0.0, LARGEST))


def clip_by_value(limit: float) -> ClipByValue:
    """Clip each element to [-limit, limit]; `limit` is the default of hyperparameter clip_value."""
    return ClipByValue(number("clip_by_value", "limit", limit, 0.0, LARGEST))


def weight_decay(rate: float) -> WeightDecay:
    """Add `rate` times the parameter to its gradient; `rate` is the default of hyperparameter weight_decay."""
    return WeightDecay(number("weight_decay", "rate", rate, 0.0, LARGEST))


def proximal(mu: float, anchor: Anchor = "start", *, name: str = "mu") -> Proximal:
    """Pull each parameter towards its value at the round's start, or towards the broadcast tensor of its name.

    `mu` is the default of the hyperparameter called `name` (FedProx, Li et al. 2020, section 3).
    """
    if anchor not in ("start", "broadcast"):
        raise TrainingError(f"proximal: anchor must be 'start' or 'broadcast', is {anchor!r}")
    if not isinstance(name, str) or not name:
        raise TrainingError(f"proximal: name must be the name of a hyperparameter, is {name!r}")
    return Proximal(number("proximal", "mu", mu, 0.0, LARGEST), anchor, name)


def correction(name: str = "correction") -> Correction:
    """Add to each gradient the round state `name`/PARAMETER, which a `begin` program makes."""
    if not isinstance(name, str) or not name:
        raise TrainingError(f"correction: name must be that of a state, is {name!r}")
    return Correction(name)


def norm_dtype(gradients: Sequence[ir.Value]) -> ir.DataType:
    """The type of their norm: float64 if one of them is, and else float32."""
    # At least float32: squares overflow in float16 from 256 on.
    wide = any(dtype_of(g) == ir.DataType.DOUBLE for g in gradients)
    return ir.DataType.DOUBLE if wide else ir.DataType.FLOAT


def global_norm(op: Builder, gradients: Sequence[ir.Value]) -> ir.Value:
    """The 2-norm of all gradients together: a scalar, float64 if one of them is and else float32."""
    dtype = norm_dtype(gradients)
    squares = [op.ReduceSumSquare(cast(op, g, dtype), keepdims=0) for g in gradients]
    return op.Sqrt(op.Sum(*squares) if len(squares) > 1 else squares[0])
