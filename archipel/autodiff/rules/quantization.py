"""Quantization, differentiated straight through.

The straight-through estimator (Bengio et al. 2013, section 3) takes rounding as the identity. So an integer tensor has
a cotangent: that of the real number that the integer stands for, in the type of the scale. Where the integer saturates,
the input has gradient 0. The scale gets the gradient of LSQ (Esser et al. 2020, equation 3), without its factor
1/sqrt(n q_max). Zero points have no gradient, and scale and zero point of a DynamicQuantizeLinear count as constants.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from archipel.autodiff.context import RuleContext
from archipel.autodiff.registry import Gradients, rule
from archipel.graph.build import Builder
from archipel.graph.shapes import dims, dtype_of, is_float, rank


@rule("", "QuantizeLinear")
def quantize_linear(ctx: RuleContext) -> Gradients:
    """q = saturate(round(x / s) + z): dq/dx = 1/s and dq/ds = -x/s^2 inside the range, 0 where q saturates."""
    op, x, kind = ctx.op, ctx.input(0), dtype_of(ctx.output)
    scale = _spread(ctx, ctx.input(1))
    # Saturation is where the integer before clipping, z included, leaves the range of the integer type.
    ratio = op.Div(x, scale)
    real = op.Round(ratio)
    zero = _zero_point(ctx, x)
    if zero is not None:
        real = op.Add(real, zero)
    inside = op.Equal(real, op.Clip(real, float(kind.min), float(kind.max)))
    # dq/ds = -x / s^2 = -(x / s) dq/dx, so the scale's gradient needs no second mask.
    grad_x = op.Mul(_unscaled(op, ctx.cotangent, scale), op.Cast(inside, to=int(dtype_of(x))))
    grad_scale = op.Neg(_sum_per_scale(ctx, op.Mul(grad_x, ratio), ctx.input(1))) if ctx.wants(1) else None
    return [grad_x, grad_scale]


@rule("", "DequantizeLinear")
def dequantize_linear(ctx: RuleContext) -> Gradients:
    """y = (q - z) s: dq = g s, ds = g (q - z), summed over what each scale serves."""
    op, g, scale = ctx.op, ctx.cotangent, ctx.input(1)
    grad_q = op.Mul(g, _spread(ctx, scale)) if ctx.wants(0) else None
    if not ctx.wants(1):
        return [grad_q]
    # q has an integer type; its difference to z may not fit that, so both are cast first.
    steps = op.Cast(ctx.input(0), to=int(dtype_of(g)))
    zero = _zero_point(ctx, g)
    if zero is not None:
        steps = op.Sub(steps, zero)
    return [grad_q, _sum_per_scale(ctx, op.Mul(g, steps), scale)]


@rule("", "DynamicQuantizeLinear")
def dynamic_quantize_linear(ctx: RuleContext) -> Gradients:
    """q = round(x / s) + z: dq/dx = 1/s, with s and z as constants. They fit the range of x, so nothing saturates."""
    return [_unscaled(ctx.op, ctx.cotangent, ctx.outputs[1])]


def _zero_point(ctx: RuleContext, like: ir.Value) -> ir.Value | None:
    given = ctx.optional(2)
    if given is None:
        return None
    return _spread(ctx, ctx.op.Cast(given, to=int(dtype_of(like))))


def _unscaled(op: Builder, cotangent: ir.Value, scale: ir.Value) -> ir.Value:
    """cotangent / scale; g itself for a cotangent g s, as a DequantizeLinear with the same scale gives it."""
    product = cotangent.producer()
    if product is not None and product.op_type == "Mul":
        factor, by = product.inputs
        if factor is not None and by is not None and (by is scale or _expression(by) == _expression(scale)):
            return factor
    return op.Div(cotangent, scale)


def _expression(value: ir.Value) -> tuple[object, ...]:
    """What computes a value, to compare two: both rules reshape the scale for themselves."""
    node = value.producer()
    return (value,) if node is None else (node.op_type, tuple(node.inputs), dict(node.attributes))


def _spread(ctx: RuleContext, value: ir.Value) -> ir.Value:
    """A scale or zero point so that it broadcasts against input 0; one for the tensor, per axis or per block."""
    op, n, axis = ctx.op, rank(ctx.input(0)), _axis(ctx)
    result = value
    if _blocked(ctx):
        result = op.Gather(value, _block_of(ctx), axis=axis)
        result.shape = ctx.input(0).shape
    elif dims(value) not in ((), (1,)):
        result = op.Reshape(value, [-1 if i == axis else 1 for i in range(n)])
    return result


def _sum_per_scale(ctx: RuleContext, value: ir.Value, scale: ir.Value) -> ir.Value:
    """The adjoint of `_spread`: for each scale the sum over the elements that it serves."""
    op, n, axis = ctx.op, rank(ctx.input(0)), _axis(ctx)
    if _blocked(ctx):
        index = op.Reshape(_block_of(ctx), [-1 if i == axis else 1 for i in range(n)])
        zeros = op.full_like(scale, 0.0)
        return op.ScatterElements(zeros, op.expand_like(index, value), value, axis=axis, reduction="add")
    if dims(scale) in ((), (1,)):
        return op.sum_to(value, scale)
    others = [i for i in range(n) if i != axis]
    result = op.ReduceSum(value, others, keepdims=0) if others else value
    return result


def _block_of(ctx: RuleContext) -> ir.Value:
    """The number of the block that each position along the axis belongs to."""
    op, axis, block = ctx.op, _axis(ctx), ctx.attribute("block_size", 0)
    # Input and output have the same shape. Read the float one: ONNX Runtime's Shape takes no four-bit integers.
    real = ctx.input(0) if is_float(ctx.input(0)) else ctx.output
    size = dims(real)[axis]
    if isinstance(size, int):
        return op.constant(np.arange(size) // block)
    length = op.Squeeze(op.Shape(real, start=axis, end=axis + 1), [0])
    return op.Div(op.Range(op.constant(0), length, op.constant(1)), op.constant(block))


def _blocked(ctx: RuleContext) -> bool:
    return bool(ctx.attribute("block_size", 0)) and rank(ctx.input(1)) > 0


def _axis(ctx: RuleContext) -> int:
    axis: int = ctx.attribute("axis", 1)
    return axis % max(rank(ctx.input(0)), 1)
