"""Arithmetic, element by element, with broadcasting.

In the formulas g is the cotangent of y. `sum_to` sums over the axes along which broadcasting repeated an operand.
"""

from __future__ import annotations

import math

import onnx_ir as ir

from archipel.autodiff.context import RuleContext
from archipel.autodiff.registry import Gradients, rule
from archipel.graph.shapes import constant_array, dtype_of


@rule("", "Add")
def add(ctx: RuleContext) -> Gradients:
    """y = a + b: da = db = g."""
    g = ctx.cotangent
    return [ctx.op.sum_to(g, ctx.input(0)), ctx.op.sum_to(g, ctx.input(1))]


@rule("", "Sub")
def sub(ctx: RuleContext) -> Gradients:
    """y = a - b: da = g, db = -g."""
    g = ctx.cotangent
    return [ctx.op.sum_to(g, ctx.input(0)), ctx.op.Neg(ctx.op.sum_to(g, ctx.input(1)))]


@rule("", "Mul")
def mul(ctx: RuleContext) -> Gradients:
    """y = a b: da = g b, db = g a."""
    op, g, a, b = ctx.op, ctx.cotangent, ctx.input(0), ctx.input(1)
    return [
        op.sum_to(op.Mul(g, b), a) if ctx.wants(0) else None,
        op.sum_to(op.Mul(g, a), b) if ctx.wants(1) else None,
    ]


@rule("", "Div")
def div(ctx: RuleContext) -> Gradients:
    """y = a / b: da = g / b, db = -g a / b^2 = -(g / b) y."""
    op, a, b = ctx.op, ctx.input(0), ctx.input(1)
    scaled = op.Div(ctx.cotangent, b)
    return [
        op.sum_to(scaled, a) if ctx.wants(0) else None,
        op.Neg(op.sum_to(op.Mul(scaled, ctx.output), b)) if ctx.wants(1) else None,
    ]


@rule("", "Mod")
def mod(ctx: RuleContext) -> Gradients:
    """y = a - k b with a whole number k: da = g, db = -k g, where k does not change."""
    op, a, b = ctx.op, ctx.input(0), ctx.input(1)
    count = op.Round(op.Div(op.Sub(a, ctx.output), b)) if ctx.wants(1) else None
    return [
        op.sum_to(ctx.cotangent, a) if ctx.wants(0) else None,
        None if count is None else op.Neg(op.sum_to(op.Mul(ctx.cotangent, count), b)),
    ]


@rule("", "Neg")
def neg(ctx: RuleContext) -> Gradients:
    """y = -x: dx = -g."""
    return [ctx.op.Neg(ctx.cotangent)]


@rule("", "Exp")
def exp(ctx: RuleContext) -> Gradients:
    """y = exp x: dx = g y."""
    return [ctx.op.Mul(ctx.cotangent, ctx.output)]


@rule("", "Log")
def log(ctx: RuleContext) -> Gradients:
    """y = log x: dx = g / x."""
    return [ctx.op.Div(ctx.cotangent, ctx.input(0))]


@rule("", "Sqrt")
def sqrt(ctx: RuleContext) -> Gradients:
    """y = sqrt x: dx = g / (2 y)."""
    return [ctx.op.Div(ctx.op.Mul(ctx.cotangent, 0.5), ctx.output)]


@rule("", "Abs")
def absolute(ctx: RuleContext) -> Gradients:
    """dx = g sign x: 0 at 0, as in PyTorch."""
    return [ctx.op.Mul(ctx.cotangent, ctx.op.Sign(ctx.input(0)))]


@rule("", "Reciprocal")
def reciprocal(ctx: RuleContext) -> Gradients:
    """y = 1 / x: dx = -g y^2."""
    op, y = ctx.op, ctx.output
    return [op.Neg(op.Mul(ctx.cotangent, op.Mul(y, y)))]


@rule("", "Sin")
def sin(ctx: RuleContext) -> Gradients:
    """y = sin x: dx = g cos x."""
    return [ctx.op.Mul(ctx.cotangent, ctx.op.Cos(ctx.input(0)))]


@rule("", "Cos")
def cos(ctx: RuleContext) -> Gradients:
    """y = cos x: dx = -g sin x."""
    return [ctx.op.Neg(ctx.op.Mul(ctx.cotangent, ctx.op.Sin(ctx.input(0))))]


@rule("", "Erf")
def erf(ctx: RuleContext) -> Gradients:
    """y = erf x: dx = g 2 / sqrt(pi) exp(-x^2)."""
    op, x = ctx.op, ctx.input(0)
    # The factor is in the exponent, so that it takes no pass of its own.
    return [op.Mul(ctx.cotangent, op.Exp(op.Sub(math.log(2 / math.sqrt(math.pi)), op.Mul(x, x))))]


@rule("", "Pow")
def power(ctx: RuleContext) -> Gradients:
    """y = x^e: dx = g e x^(e-1), de = g y log x.

    The base has gradient 0 where the exponent is 0, the exponent where the base is 0 and the exponent not negative,
    both as in PyTorch. A negative base gives the exponent NaN.
    """
    op, g, x, y = ctx.op, ctx.cotangent, ctx.input(0), ctx.input(1)
    exponent = y if y.dtype == x.dtype else op.Cast(y, to=int(dtype_of(x)))
    grad_x = op.sum_to(op.Mul(g, _slope(ctx, x, exponent)), x) if ctx.wants(0) else None
    if not ctx.wants(1):
        return [grad_x]
    # log 1 in place of log 0: y log x would be NaN (y = 0) or minus infinity (y = 1) there.
    safe = op.Where(op.And(op.Equal(x, 0.0), op.GreaterOrEqual(exponent, 0.0)), op.constant(1.0, x.dtype), x)
    grad_y = op.sum_to(op.Mul(g, op.Mul(ctx.output, op.Log(safe))), y)
    return [grad_x, grad_y if y.dtype == x.dtype else op.Cast(grad_y, to=int(dtype_of(y)))]


def _slope(ctx: RuleContext, x: ir.Value, exponent: ir.Value) -> ir.Value:
    """e x^(e-1), and 0 where e is 0."""
    op = ctx.op
    fixed = constant_array(ctx.input(1))
    # One known exponent needs no masks. Exponent 0 takes x^0, not x^-1: 0 times an infinite 0^-1 would be NaN.
    if fixed is not None and fixed.size == 1:
        value = float(fixed.reshape(()))
        return op.Mul(x if value == 2.0 else op.Pow(x, value - 1.0 if value else 0.0), value)
    # The cast to bool and back is 1 where the exponent is not 0: e - 1 there, and 0 (as above) where it is.
    less = op.Sub(exponent, op.Cast(op.Cast(exponent, to=int(ir.DataType.BOOL)), to=int(dtype_of(x))))
    return op.Mul(exponent, op.Pow(x, less))


@rule("", "Sum")
def total(ctx: RuleContext) -> Gradients:
    """y = sum of all inputs: each has gradient g."""
    return [ctx.op.sum_to(ctx.cotangent, ctx.input(i)) for i in range(len(ctx.inputs))]


@rule("", "Mean")
def mean(ctx: RuleContext) -> Gradients:
    """y = mean of n inputs: each has gradient g / n."""
    g = ctx.op.Mul(ctx.cotangent, 1.0 / len(ctx.inputs))
    return [ctx.op.sum_to(g, ctx.input(i)) for i in range(len(ctx.inputs))]


@rule("", "Sign", "Floor", "Ceil", "Round")
def steps(ctx: RuleContext) -> Gradients:
    """Zero everywhere, at the steps too, as in PyTorch."""
    return [ctx.op.full_like(ctx.input(0), 0.0)]
