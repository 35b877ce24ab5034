"""Reductions over axes.

`_restore_axes` gives a reduced value its reduced axes back, with size 1; broadcasting then repeats it along them.
"""

from __future__ import annotations

import onnx_ir as ir

from archipel.autodiff.context import RuleContext
from archipel.autodiff.registry import Gradients, rule
from archipel.graph.build import Builder
from archipel.graph.control import branch
from archipel.graph.shapes import constant_array, dims, dtype_of, rank, static_size


@rule("", "ReduceSum")
def reduce_sum(ctx: RuleContext) -> Gradients:
    """Every element has the gradient of its sum."""
    return [_spread(ctx, ctx.cotangent)]


@rule("", "ReduceMean")
def reduce_mean(ctx: RuleContext) -> Gradients:
    """y = sum x / n: dx = g / n, with n the number of elements that one mean is over."""
    op, g, axes = ctx.op, ctx.cotangent, _axes(ctx)
    shape = dims(ctx.input(0))
    reduced = None if axes is None else [shape[axis] for axis in axes]
    count = None if reduced is None else static_size(reduced)
    if count is not None:
        return [_spread(ctx, op.Mul(g, 1.0 / max(count, 1)) if count != 1 else g)]
    # n is known at run time only: how many inputs there are for each output.
    ratio = op.Div(op.Size(ctx.input(0)), op.Size(ctx.output))
    return [_spread(ctx, op.Div(g, op.Cast(ratio, to=int(dtype_of(g)))))]


@rule("", "ReduceSumSquare")
def reduce_sum_square(ctx: RuleContext) -> Gradients:
    """y = sum x^2: dx = 2 g x."""
    op = ctx.op
    return [op.Mul(ctx.input(0), _restore_axes(ctx, op.Mul(ctx.cotangent, 2.0)))]


@rule("", "ReduceL1")
def reduce_l1(ctx: RuleContext) -> Gradients:
    """y = sum |x|: dx = g sign x, 0 at 0, as in PyTorch."""
    return [ctx.op.Mul(ctx.op.Sign(ctx.input(0)), _restore_axes(ctx, ctx.cotangent))]


@rule("", "ReduceL2")
def reduce_l2(ctx: RuleContext) -> Gradients:
    """y = sqrt(sum x^2): dx = g x / y; where y is 0, dx is 0, as in PyTorch."""
    op = ctx.op
    return [op.Mul(ctx.input(0), _restore_axes(ctx, op.Div(ctx.cotangent, replace_zeros(op, ctx.output))))]


@rule("", "ReduceProd")
def reduce_prod(ctx: RuleContext) -> Gradients:
    """y = prod x: dx = g y / x. Where an element is 0, the product of the others, each multiplied out."""
    op, x = ctx.op, ctx.input(0)
    axes = _axes(ctx)
    if axes is None:
        ctx.refuse("axes that are computed at run time", "the products of all but one element are taken along them")
    g = _restore_axes(ctx, ctx.cotangent)
    if not axes:
        return [g]
    zeros = op.ReduceSum(op.Cast(op.Equal(x, 0.0), to=int(dtype_of(x))), keepdims=0)

    def quotient(op: Builder) -> list[ir.Value]:
        return [op.Mul(op.Div(_restore_axes(ctx, ctx.output), x), g)]

    def products(op: Builder) -> list[ir.Value]:
        return [op.Mul(_products_of_others(op, x, axes), g)]

    return branch(op, op.Equal(zeros, 0.0), quotient, products, like=[x], name="prod")


def _products_of_others(op: Builder, x: ir.Value, axes: list[int]) -> ir.Value:
    """For each element the product of the others along the axes: n^2 numbers for n elements."""
    kept = [axis for axis in range(rank(x)) if axis not in axes]
    order = [*kept, *axes]
    last = op.Transpose(x, perm=order)
    flat = op.Reshape(last, [*[0] * len(kept), -1])
    count = op.Squeeze(op.Shape(flat, start=-1), [0])
    numbers = op.Range(op.constant(0), count, op.constant(1))
    itself = op.Equal(op.Unsqueeze(numbers, [0]), op.Unsqueeze(numbers, [1]))
    others = op.Where(itself, 1.0, op.Unsqueeze(flat, [-2]))
    products = op.Reshape(op.ReduceProd(others, [-1], keepdims=0), op.shape_of(last))
    return op.Transpose(products, perm=[order.index(axis) for axis in range(rank(x))])


@rule("", "ReduceLogSum")
def reduce_log_sum(ctx: RuleContext) -> Gradients:
    """y = log sum x: dx = g / sum x, and the sum is exp y."""
    op = ctx.op
    return [_spread(ctx, op.Div(ctx.cotangent, op.Exp(ctx.output)))]


@rule("", "ReduceLogSumExp")
def reduce_log_sum_exp(ctx: RuleContext) -> Gradients:
    """y = log sum exp x: dx = g exp(x - y), which never overflows; 0 where every x is minus infinity."""
    op, y = ctx.op, ctx.output
    # x - y would be NaN where both are minus infinity.
    finite = op.Max(y, float(dtype_of(y).min))
    return [op.Mul(op.Exp(op.Sub(ctx.input(0), _restore_axes(ctx, finite))), _restore_axes(ctx, ctx.cotangent))]


@rule("", "ReduceMax", "ReduceMin")
def reduce_extremum(ctx: RuleContext) -> Gradients:
    """g goes to the extreme element; n elements that share it get g / n each, as in PyTorch's amax and amin."""
    op, x = ctx.op, ctx.input(0)
    extremum = _restore_axes(ctx, ctx.output)
    mask = op.Cast(op.Equal(x, extremum), to=int(dtype_of(x)))
    noop = ctx.attribute("noop_with_empty_axes", 0)
    count = op.ReduceSum(mask, ctx.optional(1), keepdims=1, noop_with_empty_axes=noop)
    if rank(extremum) > 0:
        count.shape = extremum.shape  # inference does not know it if the axes are computed at run time
    return [op.Mul(mask, op.Div(_restore_axes(ctx, ctx.cotangent), count))]


def replace_zeros(op: Builder, value: ir.Value) -> ir.Value:
    """The value with 1 in place of 0: a denominator for zeros."""
    return op.Add(value, op.Cast(op.Equal(value, 0.0), to=int(dtype_of(value))))


def _spread(ctx: RuleContext, g: ir.Value) -> ir.Value:
    """The cotangent of a reduced value, repeated to the input's shape."""
    return ctx.op.expand_like(_restore_axes(ctx, g), ctx.input(0))


def _restore_axes(ctx: RuleContext, reduced: ir.Value) -> ir.Value:
    """A reduced value with the reduced axes put back, of size 1, so that it broadcasts against the input."""
    if ctx.attribute("keepdims", 1) or rank(reduced) == 0:
        return reduced
    axes = _axes(ctx)
    if axes is None:
        ctx.refuse("keepdims=0", "with axes that are computed at run time, it is not known where to put them back")
    return ctx.op.Unsqueeze(reduced, axes) if axes else reduced


def _axes(ctx: RuleContext) -> list[int] | None:
    """The reduced axes, sorted and not negative; None if they are known at run time only."""
    n = rank(ctx.input(0))
    given = ctx.optional(1)
    content = constant_array(given)
    if given is not None and content is None:
        return None
    # ONNX ReduceSum-13: without axes all are reduced, or none with noop_with_empty_axes.
    if content is None or content.size == 0:
        return [] if ctx.attribute("noop_with_empty_axes", 0) else list(range(n))
    return sorted(int(axis) % n for axis in content.reshape(-1))
