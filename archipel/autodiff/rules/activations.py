"""The activation functions that recurrent operators name: what each emits, and its derivative read from its result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import onnx_ir as ir

from archipel.autodiff.context import RuleContext
from archipel.graph.build import Builder

Emit = Callable[[Builder, ir.Value, float, float], ir.Value]


@dataclass(frozen=True)
class _Kind:
    """`derivative` is given the result y: in a loop that is what is kept. `defaults`: of alpha and beta, where it takes
    them; None where they must be given, as runtimes differ."""

    forward: Emit
    derivative: Emit
    defaults: tuple[float | None, ...] = ()


def _where_positive(op: Builder, y: ir.Value, positive: float, other: ir.Value | float) -> ir.Value:
    found: ir.Value = op.Where(op.Greater(y, 0.0), op.constant(positive, y.dtype), other)
    return found


def _between(op: Builder, y: ir.Value, slope: float) -> ir.Value:
    inside = op.And(op.Greater(y, 0.0), op.Less(y, 1.0))
    found: ir.Value = op.Mul(op.Cast(inside, to=y.dtype), slope)
    return found


_KINDS: dict[str, _Kind] = {
    "sigmoid": _Kind(lambda op, x, a, b: op.Sigmoid(x), lambda op, y, a, b: op.Mul(y, op.Sub(1.0, y))),
    "tanh": _Kind(lambda op, x, a, b: op.Tanh(x), lambda op, y, a, b: op.Sub(1.0, op.Mul(y, y))),
    "relu": _Kind(lambda op, x, a, b: op.Relu(x), lambda op, y, a, b: op.Cast(op.Greater(y, 0.0), to=y.dtype)),
    "affine": _Kind(
        lambda op, x, a, b: op.Add(op.Mul(x, a), b), lambda op, y, a, b: op.full_like(y, a), (None, None)
    ),
    "leakyrelu": _Kind(
        lambda op, x, a, b: op.LeakyRelu(x, alpha=a), lambda op, y, a, b: _where_positive(op, y, 1.0, a), (0.01,)
    ),
    "thresholdedrelu": _Kind(
        lambda op, x, a, b: op.ThresholdedRelu(x, alpha=a),
        lambda op, y, a, b: op.Cast(op.Greater(y, 0.0), to=y.dtype),
        (None,),
    ),
    "scaledtanh": _Kind(
        lambda op, x, a, b: op.Mul(op.Tanh(op.Mul(x, b)), a),
        lambda op, y, a, b: op.Sub(a * b, op.Mul(op.Mul(y, y), b / a)),
        (None, None),
    ),
    "hardsigmoid": _Kind(
        lambda op, x, a, b: op.HardSigmoid(x, alpha=a, beta=b), lambda op, y, a, b: _between(op, y, a), (0.2, 0.5)
    ),
    "elu": _Kind(
        lambda op, x, a, b: op.Elu(x, alpha=a),
        lambda op, y, a, b: _where_positive(op, y, 1.0, op.Add(y, a)),
        (1.0,),
    ),
    "softsign": _Kind(
        lambda op, x, a, b: op.Softsign(x), lambda op, y, a, b: op.Pow(op.Sub(1.0, op.Abs(y)), 2.0)
    ),
    "softplus": _Kind(lambda op, x, a, b: op.Softplus(x), lambda op, y, a, b: op.Sub(1.0, op.Exp(op.Neg(y)))),
}

# Below these the result does not tell on which side of the kink the argument was.
_ALPHA_POSITIVE = ("leakyrelu", "thresholdedrelu", "elu")


@dataclass(frozen=True)
class Activation:
    """One of them with its parameters."""

    kind: _Kind
    alpha: float = 0.0
    beta: float = 0.0

    def __call__(self, op: Builder, x: ir.Value) -> ir.Value:
        return self.kind.forward(op, x, self.alpha, self.beta)

    def derivative(self, op: Builder, y: ir.Value) -> ir.Value:
        """The derivative at the point where the result was `y`."""
        return self.kind.derivative(op, y, self.alpha, self.beta)


def activations(ctx: RuleContext, defaults: tuple[str, ...], directions: int) -> list[tuple[Activation, ...]]:
    """For each direction what its gates use (ONNX LSTM-14, attributes activations, activation_alpha, activation_beta).

    Each takes its parameters from the two lists in turn, if it has any, and its defaults after their end. Raises
    MissingRuleError for a function that is not known, or whose derivative its result does not determine.
    """
    names = ctx.attribute("activations", None) or list(defaults) * directions
    if len(names) != len(defaults) * directions:
        ctx.refuse("activations", f"{len(defaults)} for each of {directions} directions expected, got {names}")
    alphas, betas = iter(ctx.attribute("activation_alpha", [])), iter(ctx.attribute("activation_beta", []))
    found = []
    for name in names:
        key = name.lower()
        if key not in _KINDS:
            ctx.refuse(f"activation {name!r}", f"known are {', '.join(sorted(_KINDS))}")
        kind = _KINDS[key]
        given = [next(values, default) for values, default in zip((alphas, betas), kind.defaults)]
        if None in given:
            ctx.refuse(f"activation {name!r}", "give it activation_alpha and activation_beta; runtimes differ without")
        if (key in _ALPHA_POSITIVE and given[0] < 0) or (key == "scaledtanh" and given[0] == 0):
            ctx.refuse(f"activation {name!r}", f"no derivative from its result with alpha={given[0]}")
        found.append(Activation(kind, *map(float, given)))
    return [tuple(found[i : i + len(defaults)]) for i in range(0, len(found), len(defaults))]
