"""Optimizers with steps inside of steps: of first-order meta-learning, and of Moreau envelopes.

Each takes a batch a step, as every optimizer does, and counts: some of the steps move what is tried out, and others
what is learned. Both end at the right place after any number of steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from archipel.graph.build import Builder
from archipel.graph.shapes import dtype_of
from archipel.training.context import StepContext
from archipel.training.optimizers import SGD, HyperparameterSpec, State, StateSpec, Updated, cast
from archipel.training.schedules import MAXIMUM_RATE
from archipel.training.transforms import LARGEST

TRIED = "tried"
"""State of MetaSGD: how far the parameter is from what is learned; 0 but between the two steps of a pair."""
MOVED = "moved"
"""State of MoreauSGD: how far the local model went since the round's start."""


@dataclass(frozen=True)
class MetaSGD:
    """First-order MAML (Finn et al. 2017; Fallah et al. 2020, section 4.1, "FO"), with two batches for a step of w.

    An even step tries p = w - inner_lr grad(w). The odd step after it makes w' = w - lr grad(p) with the next batch.
    The state `tried` is p - w, so that w is the parameter minus it also where a round ends in between.
    """

    sgd: SGD
    inner_lr: float

    @property
    def hyperparameters(self) -> tuple[HyperparameterSpec, ...]:
        return (*self.sgd.hyperparameters, HyperparameterSpec("inner_lr", self.inner_lr, 0.0, MAXIMUM_RATE))

    def init(self) -> tuple[StateSpec, ...]:
        return (StateSpec(TRIED),)

    def update(
        self, op: Builder, parameter: ir.Value, gradient: ir.Value, state: State, context: StepContext
    ) -> Updated:
        tries = op.Equal(op.Mod(context.step(), 2), 0)
        rate = cast(op, context.hyperparameters["inner_lr"], dtype_of(parameter))
        tried = op.Neg(op.Mul(gradient, rate))
        outer = self.sgd.update(op, op.Sub(parameter, state[TRIED]), gradient, {}, context)
        zero = op.full_like(parameter, 0.0)
        moved = op.Where(tries, op.Add(parameter, tried), outer.parameter)
        return Updated(moved, {TRIED: op.Where(tries, tried, zero)})


@dataclass(frozen=True)
class MoreauSGD:
    """pFedMe (T Dinh et al. 2020, algorithm 1, lines 6 to 8): a personal model near a local one, which follows it.

    The parameter is the personal model p, the local one is w = start + `moved`. Each step is a proximal step on
    loss(p) + lambda / 2 |p - w|^2, p' = (p - lr grad(p) + lr lambda w) / (1 + lr lambda), which no rate makes diverge
    by the second term. Every `every`-th step then moves w' = w - local_lr lambda (w - p').
    """

    sgd: SGD
    strength: float
    local_lr: float
    every: int

    @property
    def hyperparameters(self) -> tuple[HyperparameterSpec, ...]:
        return (
            *self.sgd.hyperparameters,
            HyperparameterSpec("lambda", self.strength, 0.0, LARGEST),
            HyperparameterSpec("local_lr", self.local_lr, 0.0, MAXIMUM_RATE),
        )

    def init(self) -> tuple[StateSpec, ...]:
        return (StateSpec(MOVED),)

    def update(
        self, op: Builder, parameter: ir.Value, gradient: ir.Value, state: State, context: StepContext
    ) -> Updated:
        strength, local = (
            cast(op, context.hyperparameters[name], dtype_of(parameter)) for name in ("lambda", "local_lr")
        )
        pull = op.Mul(self.sgd.rate(op, context, dtype_of(parameter)), strength)
        model = op.Add(context.anchor(parameter, "start"), state[MOVED])
        stepped = self.sgd.update(op, parameter, gradient, {}, context).parameter
        personal = op.Div(op.Add(stepped, op.Mul(model, pull)), op.Add(pull, 1.0))
        followed = op.Sub(state[MOVED], op.Mul(op.Sub(model, personal), op.Mul(local, strength)))
        due = op.Equal(op.Mod(context.step(), self.every), self.every - 1)
        return Updated(personal, {MOVED: op.Where(due, followed, state[MOVED])})
