"""The activation functions that recurrent operators name: each with its derivative as a function of its result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import onnx_ir as ir

from archipel.autodiff.context import RuleContext
from archipel.graph.build import Builder
from archipel.graph.shapes import dtype_of

Forward = Callable[[Builder, ir.Value, float, float], ir.Value]
Pull = Callable[[Builder, ir.Value, ir.Value, float, float], ir.Value]


@dataclass(frozen=True)
class _Kind:
    """`forward` emits the function y = f(x); `pull` takes y, which the loops keep, and g, and emits g f'(x).

    `defaults`: of alpha and beta, for a function that takes them; None where runtimes differ, so they must be given.
    """

    forward: Forward
    pull: Pull
    defaults: tuple[float | None, ...] = ()


def _masked(op: Builder, inside: ir.Value, g: ir.Value, scale: float = 1.0) -> ir.Value:
    """scale g where `inside` holds, else 0."""
    masked = op.Mul(op.Cast(inside, to=dtype_of(g)), g)
    return masked if scale == 1.0 else op.Mul(masked, scale)


def _one_sided(op: Builder, y: ir.Value, g: ir.Value, other: ir.Value | float) -> ir.Value:
    """g where y > 0, else other g."""
    return op.Where(op.Greater(y, 0.0), g, op.Mul(g, other))


def _less_square(op: Builder, y: ir.Value, g: ir.Value) -> ir.Value:
    # (1 - y y) g without the scalar 1: beside a scalar ONNX Runtime handles elements one by one if the last axis is 1.
    return op.Sub(g, op.Mul(op.Mul(g, y), y))


_KINDS: dict[str, _Kind] = {
    "sigmoid": _Kind(lambda op, x, a, b: op.Sigmoid(x), lambda op, y, g, a, b: op.Mul(op.Sub(y, op.Mul(y, y)), g)),
    "tanh": _Kind(lambda op, x, a, b: op.Tanh(x), lambda op, y, g, a, b: _less_square(op, y, g)),
    "relu": _Kind(lambda op, x, a, b: op.Relu(x), lambda op, y, g, a, b: _masked(op, op.Greater(y, 0.0), g)),
    "affine": _Kind(lambda op, x, a, b: op.Add(op.Mul(x, a), b), lambda op, y, g, a, b: op.Mul(g, a), (None, None)),
    "leakyrelu": _Kind(
        lambda op, x, a, b: op.LeakyRelu(x, alpha=a), lambda op, y, g, a, b: _one_sided(op, y, g, a), (0.01,)
    ),
    "thresholdedrelu": _Kind(
        lambda op, x, a, b: op.ThresholdedRelu(x, alpha=a),
        lambda op, y, g, a, b: _masked(op, op.Greater(y, 0.0), g),
        (None,),
    ),
    "scaledtanh": _Kind(
        lambda op, x, a, b: op.Mul(op.Tanh(op.Mul(x, b)), a),
        lambda op, y, g, a, b: op.Mul(_less_square(op, op.Mul(y, 1 / a), g), a * b),
        (None, None),
    ),
    "hardsigmoid": _Kind(
        lambda op, x, a, b: op.HardSigmoid(x, alpha=a, beta=b),
        lambda op, y, g, a, b: _masked(op, op.And(op.Greater(y, 0.0), op.Less(y, 1.0)), g, a),
        (0.2, 0.5),
    ),
    "elu": _Kind(
        lambda op, x, a, b: op.Elu(x, alpha=a), lambda op, y, g, a, b: _one_sided(op, y, g, op.Add(y, a)), (1.0,)
    ),
    "softsign": _Kind(
        lambda op, x, a, b: op.Softsign(x), lambda op, y, g, a, b: op.Mul(op.Pow(op.Sub(1.0, op.Abs(y)), 2.0), g)
    ),
    "softplus": _Kind(
        lambda op, x, a, b: op.Softplus(x), lambda op, y, g, a, b: op.Mul(op.Sub(1.0, op.Exp(op.Neg(y))), g)
    ),
}

# With a negative alpha the sign of y does not tell on which side of the kink x was, so `pull` could not either.
_ALPHA_POSITIVE = ("leakyrelu", "thresholdedrelu", "elu")


@dataclass(frozen=True)
class Activation:
    """An activation function with its parameters."""

    kind: _Kind
    alpha: float = 0.0
    beta: float = 0.0

    def __call__(self, op: Builder, x: ir.Value) -> ir.Value:
        return self.kind.forward(op, x, self.alpha, self.beta)

    def pull(self, op: Builder, y: ir.Value, g: ir.Value) -> ir.Value:
        """`g` times the derivative where the result is `y`; both of the same shape."""
        return self.kind.pull(op, y, g, self.alpha, self.beta)


def named(name: str) -> Activation:
    """The activation function of this name without parameters."""
    return Activation(_KINDS[name.lower()])


def activations(ctx: RuleContext, defaults: tuple[str, ...], directions: int) -> list[tuple[Activation, ...]]:
    """The activation functions of each direction (ONNX LSTM-14: activations, activation_alpha, activation_beta).

    A function that has parameters takes the next ones of the two lists, and its defaults after their end. Raises
    MissingRuleError for an unknown function, or one whose derivative its result does not determine.
    """
    names = ctx.attribute("activations", None) or list(defaults) * directions
    if len(names) != len(defaults) * directions:
        ctx.refuse("activations", f"{len(defaults)} for each of {directions} directions expected, got {names}")
    alphas, betas = iter(ctx.attribute("activation_alpha", [])), iter(ctx.attribute("activation_beta", []))
    chosen = []
    for name in names:
        key = name.lower()
        if key not in _KINDS:
            ctx.refuse(f"activation {name!r}", f"known are {', '.join(sorted(_KINDS))}")
        kind = _KINDS[key]
        given: list[float] = []
        for values, default in zip((alphas, betas), kind.defaults):
            value = next(values, default)
            if value is None:
                ctx.refuse(
                    f"activation {name!r}", "runtimes differ in defaults; give activation_alpha and activation_beta"
                )
            given.append(float(value))
        if (key in _ALPHA_POSITIVE and given[0] < 0) or (key == "scaledtanh" and given[0] == 0):
            ctx.refuse(f"activation {name!r}", f"no derivative from its result with alpha={given[0]}")
        chosen.append(Activation(kind, *given))
    return [tuple(chosen[i : i + len(defaults)]) for i in range(0, len(chosen), len(defaults))]
