"""Reductions over axes."""

from __future__ import annotations

import onnx_ir as ir

from archipel.autodiff.context import RuleContext
from archipel.autodiff.registry import Gradients, rule
from archipel.graph.shapes import constant_array, dims, dtype_of, rank, static_size


@rule("", "ReduceSum")
def reduce_sum(ctx: RuleContext) -> Gradients:
    return [_spread(ctx, ctx.cotangent)]


@rule("", "ReduceMean")
def reduce_mean(ctx: RuleContext) -> Gradients:
    op, g, axes = ctx.op, ctx.cotangent, _axes(ctx)
    shape = dims(ctx.input(0))
    reduced = None if axes is None else [shape[axis] for axis in axes]
    count = None if reduced is None else static_size(reduced)
    if count is not None:
        return [_spread(ctx, op.Mul(g, 1.0 / max(count, 1)) if count != 1 else g)]
    # A size that shows at run time only.
    ratio = op.Div(op.Size(ctx.input(0)), op.Size(ctx.output))
    return [_spread(ctx, op.Div(g, op.Cast(ratio, to=int(dtype_of(g)))))]


def _spread(ctx: RuleContext, g: ir.Value) -> ir.Value:
    """Repeat what was reduced to the input's shape."""
    x = ctx.input(0)
    if not ctx.attribute("keepdims", 1) and rank(ctx.output) > 0:
        axes = _axes(ctx)
        if axes is None:
            ctx.refuse("keepdims=0", "with axes that are computed at run time, it is not known where to put them back")
        if axes:
            g = ctx.op.Unsqueeze(g, axes)
    return ctx.op.expand_like(g, x)


def _axes(ctx: RuleContext) -> list[int] | None:
    """The axes that are reduced, None if they are only known at run time."""
    n = rank(ctx.input(0))
    given = ctx.optional(1)
    content = constant_array(given)
    if given is not None and content is None:
        return None
    if content is None or content.size == 0:
        return [] if ctx.attribute("noop_with_empty_axes", 0) else list(range(n))
    return sorted(int(axis) % n for axis in content.reshape(-1))
