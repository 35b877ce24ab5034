"""Choosing between values."""

from __future__ import annotations

import onnx_ir as ir

from archipel.autodiff.context import RuleContext
from archipel.autodiff.registry import Gradients, rule
from archipel.graph.build import Builder
from archipel.graph.outline import outline
from archipel.graph.shapes import dtype_of


@rule("", "Where")
def where(ctx: RuleContext) -> Gradients:
    """y = a where the condition holds, else b: g goes to the one that was taken (ONNX Where-16)."""
    op, condition, g = ctx.op, ctx.input(0), ctx.cotangent
    zero = op.constant(0.0, g.dtype)
    return [
        None,
        op.sum_to(op.Where(condition, g, zero), ctx.input(1)) if ctx.wants(1) else None,
        op.sum_to(op.Where(condition, zero, g), ctx.input(2)) if ctx.wants(2) else None,
    ]


@rule("", "Trilu")
def trilu(ctx: RuleContext) -> Gradients:
    """A triangle is kept, the rest is 0: the same of the cotangent (ONNX Trilu-14)."""
    return [ctx.op.Trilu(ctx.cotangent, *ctx.inputs[1:], upper=ctx.attribute("upper", 1))]


@rule("", "Min", "Max")
def extremum(ctx: RuleContext) -> Gradients:
    """g goes to the extreme input; n inputs that share it get g / n each, as in PyTorch's maximum (ONNX Max-13)."""
    op, g, y = ctx.op, ctx.cotangent, ctx.output
    values = [ctx.input(i) for i in range(len(ctx.inputs))]
    if len(values) == 1:
        return [g]
    masks = [_mask(op, op.Equal(value, y), g) for value in values]
    share = op.Div(g, op.Sum(*masks))
    return [
        op.sum_to(op.Mul(share, mask), value) if ctx.wants(i) else None
        for i, (value, mask) in enumerate(zip(values, masks))
    ]


@rule("", "Clip")
def clip(ctx: RuleContext) -> Gradients:
    """y = min(max(x, low), high): g goes to x between and on the bounds, else to the bound that y is; with low > high
    to high, as in PyTorch's clamp with tensors (ONNX Clip-13)."""
    op, g, x, low, high = ctx.op, ctx.cotangent, ctx.input(0), ctx.optional(1), ctx.optional(2)
    grad_x = grad_low = grad_high = None
    if ctx.wants(0):
        grad_x = g if low is None and high is None else _between(op, g, x, ctx.output)
    if low is not None and ctx.wants(1):
        # Where low > high y is high everywhere, whatever x: nothing goes to low.
        below = op.Less(x, low)
        if high is not None:
            below = op.And(below, op.LessOrEqual(low, high))
        grad_low = op.sum_to(op.Mul(g, _mask(op, below, g)), low)
    if high is not None and ctx.wants(2):
        above = op.Greater(x, high)
        if low is not None:
            above = op.Or(above, op.Greater(low, high))
        grad_high = op.sum_to(op.Mul(g, _mask(op, above, g)), high)
    return [grad_x, grad_low, grad_high]


def _between(op: Builder, g: ir.Value, x: ir.Value, y: ir.Value) -> ir.Value:
    """g where x lies between the bounds of y: exactly where it is y, so one comparison does instead of two."""

    def body(op: Builder, g: ir.Value, x: ir.Value, y: ir.Value) -> list[ir.Value]:
        return [op.Mul(g, _mask(op, op.Equal(x, y), g))]

    is_native = dtype_of(x) == ir.DataType.FLOAT
    return (outline(op, "ClipGrad", [g, x, y], body) if is_native else body(op, g, x, y))[0]


def _mask(op: Builder, condition: ir.Value, like: ir.Value) -> ir.Value:
    """1 where the condition holds, else 0."""
    return op.Cast(condition, to=int(dtype_of(like)))
