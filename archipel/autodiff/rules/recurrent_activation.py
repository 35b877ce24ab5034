"""The activation functions that recurrent operators name: what each emits, and its derivative read from its result."""

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
    """`pull` is given the result y, which is what loops keep, and what to multiply the derivative with. `defaults`: of
    alpha and beta, where it takes them; None where they must be given, as runtimes differ."""

    forward: Forward
    pull: Pull
    defaults: tuple[float | None, ...] = ()


def _where(op: Builder, inside: ir.Value, g: ir.Value, scale: float = 1.0) -> ir.Value:
    found = op.Mul(op.Cast(inside, to=dtype_of(g)), g)
    return found if scale == 1.0 else op.Mul(found, scale)


def _one_sided(op: Builder, y: ir.Value, g: ir.Value, other: ir.Value | float) -> ir.Value:
    return op.Where(op.Greater(y, 0.0), g, op.Mul(g, other))


def _less_square(op: Builder, y: ir.Value, g: ir.Value) -> ir.Value:
    # As (1 - y y) g, but ONNX Runtime takes numbers one by one from a scalar where the batch, in front, is 1.
    return op.Sub(g, op.Mul(op.Mul(g, y), y))


_KINDS: dict[str, _Kind] = {
    "sigmoid": _Kind(lambda op, x, a, b: op.Sigmoid(x), lambda op, y, g, a, b: op.Mul(op.Sub(y, op.Mul(y, y)), g)),
    "tanh": _Kind(lambda op, x, a, b: op.Tanh(x), lambda op, y, g, a, b: _less_square(op, y, g)),
    "relu": _Kind(lambda op, x, a, b: op.Relu(x), lambda op, y, g, a, b: _where(op, op.Greater(y, 0.0), g)),
    "affine": _Kind(lambda op, x, a, b: op.Add(op.Mul(x, a), b), lambda op, y, g, a, b: op.Mul(g, a), (None, None)),
    "leakyrelu": _Kind(
        lambda op, x, a, b: op.LeakyRelu(x, alpha=a), lambda op, y, g, a, b: _one_sided(op, y, g, a), (0.01,)
    ),
    "thresholdedrelu": _Kind(
        lambda op, x, a, b: op.ThresholdedRelu(x, alpha=a),
        lambda op, y, g, a, b: _where(op, op.Greater(y, 0.0), g),
        (None,),
    ),
    "scaledtanh": _Kind(
        lambda op, x, a, b: op.Mul(op.Tanh(op.Mul(x, b)), a),
        lambda op, y, g, a, b: op.Mul(_less_square(op, op.Mul(y, 1 / a), g), a * b),
        (None, None),
    ),
    "hardsigmoid": _Kind(
        lambda op, x, a, b: op.HardSigmoid(x, alpha=a, beta=b),
        lambda op, y, g, a, b: _where(op, op.And(op.Greater(y, 0.0), op.Less(y, 1.0)), g, a),
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

    def pull(self, op: Builder, y: ir.Value, g: ir.Value) -> ir.Value:
        """`g` times the derivative at the point where the result was `y`; of equal shapes."""
        return self.kind.pull(op, y, g, self.alpha, self.beta)


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
        found.append(Activation(kind, *given))
    return [tuple(found[i : i + len(defaults)]) for i in range(0, len(found), len(defaults))]
