"""Optimizers as graphs: what state a parameter needs, and how one step changes both.

Arguments and results are those of torch.optim. Only `lr` can change at run time; the other numbers are fixed in the
graph, so that expressions of them alone are computed when it is built. Expressions that all parameters share, such as
Adam's bias correction, are emitted for each parameter alike; the elimination of common subexpressions merges them.

Example:
    step = archipel.training.step_graph(model, losses.cross_entropy(), optimizers.sgd(lr=0.1, momentum=0.9))
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import onnx_ir as ir

from archipel.errors import TrainingError
from archipel.graph.build import Builder
from archipel.graph.shapes import dtype_of
from archipel.training.arguments import flag, number
from archipel.training.context import StepContext
from archipel.training.schedules import MAXIMUM_RATE, Schedule


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


State = Mapping[str, ir.Value]
"""The state of one parameter, by the names that its StateSpecs have."""


@dataclass(frozen=True)
class Updated:
    """New values of a parameter and of its state, by the state's name."""

    parameter: ir.Value
    state: State


OPTIMIZER_METHODS = ("hyperparameters", "init", "update")


class Optimizer(Protocol):
    """An init/update pair. A step calls `update` once for each parameter, with values of the graph."""

    @property
    def hyperparameters(self) -> tuple[HyperparameterSpec, ...]: ...

    def init(self) -> tuple[StateSpec, ...]:
        """The state of one parameter."""

    def update(
        self, op: Builder, parameter: ir.Value, gradient: ir.Value, state: State, context: StepContext
    ) -> Updated:
        """Emit one step for one parameter."""


@dataclass(frozen=True)
class Descent:
    """The base of the optimizers here: a learning rate and weight decay."""

    lr: float | Schedule
    weight_decay: float

    @property
    def hyperparameters(self) -> tuple[HyperparameterSpec, ...]:
        default = self.lr.base if isinstance(self.lr, Schedule) else self.lr
        return (HyperparameterSpec("lr", default, 0.0, MAXIMUM_RATE),)

    def rate(self, op: Builder, context: StepContext, dtype: ir.DataType) -> ir.Value:
        """The learning rate of this step, a scalar."""
        rate = context.hyperparameters["lr"]  # the schedule is a factor, so that a plan that sets `lr` scales it
        if isinstance(self.lr, Schedule):
            rate = op.Mul(rate, self.lr.factor(op, context.step()))
        return cast(op, rate, dtype)

    def decayed(self, op: Builder, parameter: ir.Value, gradient: ir.Value) -> ir.Value:
        """The gradient plus that of weight_decay |p|^2 / 2, the L2 penalty."""
        if not self.weight_decay:
            return gradient
        return op.Add(op.Mul(parameter, self.weight_decay), gradient)


@dataclass(frozen=True)
class SGD(Descent):
    """v' = m v + (1 - dampening) g, p' = p - lr v' (Sutskever et al. 2013, in PyTorch's form)."""

    momentum: float
    dampening: float
    nesterov: bool

    def init(self) -> tuple[StateSpec, ...]:
        return (StateSpec("momentum"),) if self.momentum else ()

    def update(
        self, op: Builder, parameter: ir.Value, gradient: ir.Value, state: State, context: StepContext
    ) -> Updated:
        rate = self.rate(op, context, dtype_of(parameter))
        if not self.momentum:
            # p (1 - lr wd) - lr g: one pass over the parameter less than adding the decay to the gradient.
            if self.weight_decay:
                kept = op.Mul(parameter, op.Sub(1.0, op.Mul(rate, self.weight_decay)))
                return Updated(op.Sub(kept, op.Mul(gradient, rate)), {})
            return Updated(op.Sub(parameter, op.Mul(gradient, rate)), {})
        gradient = self.decayed(op, parameter, gradient)
        added = gradient
        if self.dampening:
            # As in PyTorch, whose momentum starts as the first gradient, undamped; here it starts with each round.
            first = op.Equal(context.step(), 0)
            one, damped = (op.constant(x, dtype_of(parameter)) for x in (1.0, 1.0 - self.dampening))
            added = op.Mul(gradient, op.Where(first, one, damped))
        # Without lr in it, as in PyTorch, so that a new rate acts at once on all of the momentum.
        velocity = op.Add(op.Mul(state["momentum"], self.momentum), added)
        direction = op.Add(op.Mul(velocity, self.momentum), gradient) if self.nesterov else velocity
        return Updated(op.Sub(parameter, op.Mul(direction, rate)), {"momentum": velocity})


@dataclass(frozen=True)
class Adam(Descent):
    """Kingma and Ba 2015; `decoupled` weight decay is Loshchilov and Hutter 2019, `amsgrad` is Reddi et al. 2018.

    The state holds decaying sums of gradients and squares, which are PyTorch's moments divided by 1 - beta. That saves
    a product over each parameter; the factors 1 - beta go into the two scalars of the step.
    """

    betas: tuple[float, float]
    eps: float
    amsgrad: bool
    decoupled: bool

    def init(self) -> tuple[StateSpec, ...]:
        names = ("gradient_sum", "square_sum", "square_peak")
        return tuple(StateSpec(name) for name in names[: 3 if self.amsgrad else 2])

    def update(
        self, op: Builder, parameter: ir.Value, gradient: ir.Value, state: State, context: StepContext
    ) -> Updated:
        # AdamW shrinks the parameter itself, out of reach of the adaptive division; Adam adds decay to the gradient.
        if self.decoupled and self.weight_decay:
            rate = self.rate(op, context, dtype_of(parameter))
            parameter = op.Mul(parameter, op.Sub(1.0, op.Mul(rate, self.weight_decay)))
        else:
            gradient = self.decayed(op, parameter, gradient)
        gradients = op.Add(op.Mul(state["gradient_sum"], self.betas[0]), gradient)
        squares = op.Add(op.Mul(state["square_sum"], self.betas[1]), op.Mul(gradient, gradient))
        updated = {"gradient_sum": gradients, "square_sum": squares}
        if self.amsgrad:
            # The largest sum so far divides, and the sum itself goes on decaying.
            squares = updated["square_peak"] = op.Max(state["square_peak"], squares)
        rate, eps = (cast(op, value, dtype_of(parameter)) for value in self._scalars(op, context))
        change = op.Mul(op.Div(gradients, op.Add(op.Sqrt(squares), eps)), rate)
        return Updated(op.Sub(parameter, change), updated)

    def _scalars(self, op: Builder, context: StepContext) -> tuple[ir.Value, ir.Value]:
        """The rate and eps with which the sums give the bias-corrected step.

        With G and S the sums, m = (1 - b1) G and v = (1 - b2) S, and d1, d2 = 1 - b1^t, 1 - b2^t, Adam's step
        lr (m / d1) / (sqrt(v / d2) + eps) is rate G / (sqrt(S) + eps'), with eps' = eps sqrt(d2 / (1 - b2)) and
        rate = lr (1 - b1) / sqrt(1 - b2) sqrt(d2) / d1. In float64, since 1 - b^t loses digits in float32.
        """
        one, two = self.betas
        # t counts from 1: at 0 both corrections would be 0.
        time = op.Cast(op.Add(context.step(), 1), to=int(ir.DataType.DOUBLE))
        powers = [op.Pow(op.constant(beta, ir.DataType.DOUBLE), time) for beta in self.betas]
        root = op.Sqrt(op.Sub(1.0, powers[1]))
        rate = op.Mul(self.rate(op, context, ir.DataType.DOUBLE), (1.0 - one) / math.sqrt(1.0 - two))
        corrected = op.Div(op.Mul(rate, root), op.Sub(1.0, powers[0]))
        return corrected, op.Mul(root, self.eps / math.sqrt(1.0 - two))


@dataclass(frozen=True)
class Adagrad(Descent):
    """s' = s + g^2, p' = p - lr g / (sqrt(s') + eps) (Duchi et al. 2011)."""

    lr_decay: float
    initial_accumulator_value: float
    eps: float

    def init(self) -> tuple[StateSpec, ...]:
        return (StateSpec("square_sum", self.initial_accumulator_value),)

    def update(
        self, op: Builder, parameter: ir.Value, gradient: ir.Value, state: State, context: StepContext
    ) -> Updated:
        gradient = self.decayed(op, parameter, gradient)
        rate = self.rate(op, context, dtype_of(parameter))
        if self.lr_decay:  # PyTorch counts from 1 and divides by 1 + (t - 1) lr_decay, which is the same
            steps = op.Cast(context.step(), to=int(dtype_of(parameter)))
            rate = op.Div(rate, op.Add(op.Mul(steps, self.lr_decay), 1.0))
        squares = op.Add(state["square_sum"], op.Mul(gradient, gradient))  # never decays: the effective rate falls
        change = op.Mul(op.Div(gradient, op.Add(op.Sqrt(squares), self.eps)), rate)
        return Updated(op.Sub(parameter, change), {"square_sum": squares})


@dataclass(frozen=True)
class RMSprop(Descent):
    """Hinton 2012, lecture 6e; `centered` is Graves 2013.

    The state holds decaying sums, which are PyTorch's averages divided by 1 - alpha, and its momentum is PyTorch's
    times sqrt(1 - alpha). The rate and eps make up for these factors.
    """

    alpha: float
    eps: float
    momentum: float
    centered: bool

    def init(self) -> tuple[StateSpec, ...]:
        names = ["square_sum"]
        if self.centered:
            names.append("gradient_sum")
        if self.momentum:
            names.append("momentum")
        return tuple(StateSpec(name) for name in names)

    def update(
        self, op: Builder, parameter: ir.Value, gradient: ir.Value, state: State, context: StepContext
    ) -> Updated:
        gradient = self.decayed(op, parameter, gradient)
        scale = math.sqrt(1.0 - self.alpha)
        squares = op.Add(op.Mul(state["square_sum"], self.alpha), op.Mul(gradient, gradient))
        updated = {"square_sum": squares}
        if self.centered:
            sums = updated["gradient_sum"] = op.Add(op.Mul(state["gradient_sum"], self.alpha), gradient)
            # mean of squares - square of mean, both divided by 1 - alpha. Rounding can make a variance of 0 negative.
            squares = op.Relu(op.Sub(squares, op.Mul(op.Mul(sums, sums), 1.0 - self.alpha)))
        # With v the average, sqrt(v) + eps is scale (sqrt(sum) + eps / scale); the rate makes up for the first factor.
        direction = op.Div(gradient, op.Add(op.Sqrt(squares), self.eps / scale))
        if self.momentum:  # of directions, not of gradients, as in PyTorch
            direction = updated["momentum"] = op.Add(op.Mul(state["momentum"], self.momentum), direction)
        rate = op.Mul(self.rate(op, context, dtype_of(parameter)), 1.0 / scale)
        return Updated(op.Sub(parameter, op.Mul(direction, rate)), updated)


def sgd(
    momentum: float = 0.0,
    *,
    dampening: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    lr: float | Schedule = 0.01,
) -> SGD:
    """Stochastic gradient descent. State: `momentum`, if there is any.

    Arguments:
        momentum: from 0 to below 1.
        dampening: the share of each gradient after the first that momentum leaves out, from 0 to 1.
        nesterov: look ahead along the momentum; needs momentum and no dampening.
        weight_decay: L2 penalty, 0 or more.
        lr: a number from 0 to 100, the default of the hyperparameter `lr`, or a schedule of training.schedules.

    Raises TrainingError for a number out of bounds.

    Example:
        step_graph(model, losses.cross_entropy(), optimizers.sgd(momentum=0.9, lr=schedules.cosine(0.1, steps=500)))
    """
    momentum = number("sgd", "momentum", momentum, 0.0, 1.0, ends="[)")
    dampening = number("sgd", "dampening", dampening, 0.0, 1.0)
    if flag("sgd", "nesterov", nesterov) and (not momentum or dampening):
        raise TrainingError(f"sgd: nesterov needs momentum and no dampening, got {momentum} and {dampening}")
    return SGD(_rate("sgd", lr), number("sgd", "weight_decay", weight_decay), momentum, dampening, nesterov)


def adam(
    lr: float | Schedule = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
) -> Adam:
    """Adam. State: `gradient_sum`, `square_sum`, with amsgrad `square_peak`.

    Arguments:
        lr: a number from 0 to 100, the default of the hyperparameter `lr`, or a schedule of training.schedules.
        betas: the decay of the sums of gradients and of squares, each from 0 to below 1.
        eps: added to the root of the mean square, 0 or more.
        weight_decay: L2 penalty, added to the gradient; 0 or more.
        amsgrad: divide by the largest sum of squares so far.

    Raises TrainingError for a number out of bounds.
    """
    return _adam("adam", lr, betas, eps, weight_decay, amsgrad, decoupled=False)


def adamw(
    lr: float | Schedule = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    amsgrad: bool = False,
) -> Adam:
    """Adam whose weight decay multiplies the parameter itself by 1 - lr weight_decay. State and arguments as `adam`."""
    return _adam("adamw", lr, betas, eps, weight_decay, amsgrad, decoupled=True)


def adagrad(
    lr: float | Schedule = 1e-2,
    lr_decay: float = 0.0,
    weight_decay: float = 0.0,
    initial_accumulator_value: float = 0.0,
    eps: float = 1e-10,
) -> Adagrad:
    """Adagrad; the rate is divided by 1 + step lr_decay, and `square_sum`, its state, starts at the given value."""
    return Adagrad(
        _rate("adagrad", lr),
        number("adagrad", "weight_decay", weight_decay),
        number("adagrad", "lr_decay", lr_decay),
        number("adagrad", "initial_accumulator_value", initial_accumulator_value),
        number("adagrad", "eps", eps),
    )


def rmsprop(
    lr: float | Schedule = 1e-2,
    alpha: float = 0.99,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    momentum: float = 0.0,
    centered: bool = False,
) -> RMSprop:
    """RMSprop. State: `square_sum`, if centered `gradient_sum`, and `momentum` if there is any.

    `alpha` is the decay of the sums, from 0 to below 1; `centered` divides by the deviation, not the root mean square.
    """
    return RMSprop(
        _rate("rmsprop", lr),
        number("rmsprop", "weight_decay", weight_decay),
        number("rmsprop", "alpha", alpha, 0.0, 1.0, ends="[)"),
        number("rmsprop", "eps", eps),
        number("rmsprop", "momentum", momentum),
        flag("rmsprop", "centered", centered),
    )


def cast(op: Builder, value: ir.Value, dtype: ir.DataType) -> ir.Value:
    """`value` in this type."""
    return value if dtype_of(value) == dtype else op.Cast(value, to=int(dtype))


def _rate(function: str, lr: float | Schedule) -> float | Schedule:
    return lr if isinstance(lr, Schedule) else number(function, "lr", lr, 0.0, MAXIMUM_RATE)


def _adam(
    function: str,
    lr: float | Schedule,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    amsgrad: bool,
    decoupled: bool,
) -> Adam:
    if not isinstance(betas, Sequence) or len(betas) != 2:
        raise TrainingError(f"{function}: betas must be two numbers, is {betas!r}")
    one, two = (number(function, f"betas[{i}]", beta, 0.0, 1.0, ends="[)") for i, beta in enumerate(betas))
    decay = number(function, "weight_decay", weight_decay)
    amsgrad = flag(function, "amsgrad", amsgrad)
    return Adam(_rate(function, lr), decay, (one, two), number(function, "eps", eps), amsgrad, decoupled)
