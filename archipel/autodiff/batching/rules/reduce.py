"""Reductions: with the lanes in front, the axes that they reduce lie one place further back."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from archipel.autodiff.batching.context import LaneContext
from archipel.autodiff.batching.table import BatchedResults, batch_rule
from archipel.graph.build import Operand
from archipel.graph.shapes import dims


@batch_rule(
    "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd",
    "ReduceSum", "ReduceSumSquare",
)  # fmt: skip
def reduce(ctx: LaneContext) -> BatchedResults:
    if ctx.batched(1):
        return []
    rank, given = ctx.rank(0), ctx.constant(1)
    nothing = bool(ctx.attribute("noop_with_empty_axes", 0))
    if ctx.has(1) and given is None:
        return ctx.same(ctx.value(0), computed_axes(ctx, nothing))
    if given is not None and given.size:
        return ctx.same(ctx.value(0), shifted(given))
    if nothing:
        return ctx.same(ctx.value(0), None if given is None else given)
    if rank:
        return ctx.same(ctx.value(0), np.arange(1, rank + 1))
    # Without an axis of its own, a lane's scalar is reduced over one of size 1: some reductions change a single number.
    return ctx.same(ctx.op.Unsqueeze(ctx.value(0), [1]), np.array([1]), keepdims=0)


def shifted(axes: np.ndarray) -> np.ndarray:
    """Axes of one lane as axes behind the lanes; those that count from the end stay."""
    return np.where(axes < 0, axes, axes + 1)


def shifted_at_runtime(ctx: LaneContext, axes: ir.Value) -> ir.Value:
    op = ctx.op
    zero, one = (op.constant(i, axes.dtype) for i in (0, 1))
    return op.Where(op.Less(axes, zero), axes, op.Add(axes, one))


def computed_axes(ctx: LaneContext, nothing: bool) -> Operand:
    """The axes behind the lanes, from an input; where it turns out to be empty, all of them (or none: `nothing`)."""
    op, axes = ctx.op, shifted_at_runtime(ctx, ctx.value(1))
    known = dims(ctx.input(1))[0]
    if nothing or (isinstance(known, int) and known > 0):
        return axes
    empty = op.Cast(op.Equal(op.Shape(axes), [0]), to=int(ir.DataType.INT64))
    every = np.arange(1, ctx.rank(0) + 1)
    return op.Concat(axes, op.Slice(every, [0], op.Mul(empty, [len(every)])), axis=0)
