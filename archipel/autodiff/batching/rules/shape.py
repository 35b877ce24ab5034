"""Operators that read or change shapes. The shape of a batched value is that of one lane, the same in all of them."""

from __future__ import annotations

import numpy as np

from archipel.autodiff.batching.context import LaneContext, Size
from archipel.autodiff.batching.rules.reduce import shifted, shifted_at_runtime
from archipel.autodiff.batching.table import BatchedResults, Shared, batch_rule
from archipel.graph.shapes import dims, is_static, static_size


@batch_rule("Shape")
def shape(ctx: LaneContext) -> BatchedResults:
    rank = ctx.rank(0)
    start, end, _ = slice(ctx.attribute("start", 0), ctx.attribute("end", None)).indices(rank)
    known = ctx.dims(0)[start:end]
    if is_static(known):
        return [Shared(ctx.op.constant(np.array(known, np.int64)))]
    return [Shared(ctx.op.Shape(ctx.value(0), start=start + 1, end=max(start, end) + 1))]


@batch_rule("Size")
def size(ctx: LaneContext) -> BatchedResults:
    known = static_size(ctx.dims(0))
    if known is not None:
        return [Shared(ctx.op.constant(np.array(known, np.int64)))]
    return [Shared(ctx.op.ReduceProd(ctx.op.Shape(ctx.value(0), start=1), [0], keepdims=0))]


@batch_rule("Reshape")
def reshape(ctx: LaneContext) -> BatchedResults:
    op, target = ctx.op, ctx.constant(1)
    copies = not ctx.attribute("allowzero", 0)  # a 0 copies the size at its place, which is one further on both sides
    lanes = 0 if copies else ctx.lanes
    if target is not None and isinstance(lanes, int):
        return ctx.same(ctx.value(0), np.array([lanes, *target], np.int64))
    front = np.array([lanes], np.int64) if isinstance(lanes, int) else lanes
    return ctx.same(ctx.value(0), op.Concat(front, ctx.value(1), axis=0))


@batch_rule("Flatten")
def flatten(ctx: LaneContext) -> BatchedResults:
    axis = ctx.attribute("axis", 1)
    axis = axis + ctx.rank(0) if axis < 0 else axis
    parts: list[Size] = []
    for sizes, start, end in ((ctx.dims(0)[:axis], 1, 1 + axis), (ctx.dims(0)[axis:], 1 + axis, None)):
        known = static_size(sizes)
        if known is not None:
            parts.append(known)
        else:
            parts.append(ctx.op.ReduceProd(ctx.op.Shape(ctx.value(0), start=start, end=end), [0], keepdims=1))
    return [ctx.reshape(ctx.value(0), ctx.lanes, *parts)]


@batch_rule("Expand")
def expand(ctx: LaneContext) -> BatchedResults:
    op, target = ctx.op, ctx.constant(1)
    length = dims(ctx.input(1))[0]
    if not isinstance(length, int):
        ctx.refuse("the rank of its result is not known; give the target shape a fixed length")
    # The lanes keep their number, and axes that only the data has keep their size.
    ones = [1] * (1 + max(ctx.rank(0) - length, 0))
    value = ctx.aligned(0, max(ctx.rank(0), length))
    if target is not None:
        return ctx.same(value, np.array([*ones, *target], np.int64))
    return ctx.same(value, op.Concat(np.array(ones, np.int64), ctx.value(1), axis=0))


@batch_rule("Tile")
def tile(ctx: LaneContext) -> BatchedResults:
    repeats = ctx.constant(1)
    if repeats is not None:
        return ctx.same(ctx.value(0), np.array([1, *repeats], np.int64))
    return ctx.same(ctx.value(0), ctx.op.Concat(np.array([1], np.int64), ctx.value(1), axis=0))


@batch_rule("Transpose")
def transpose(ctx: LaneContext) -> BatchedResults:
    order = ctx.attribute("perm", list(reversed(range(ctx.rank(0)))))
    return ctx.same(ctx.value(0), perm=[0, *(axis + 1 for axis in order)])


@batch_rule("Squeeze", "Unsqueeze")
def squeeze(ctx: LaneContext) -> BatchedResults:
    if ctx.has(1):
        axes = ctx.constant(1)
        return ctx.same(ctx.value(0), shifted_at_runtime(ctx, ctx.value(1)) if axes is None else shifted(axes))
    if not is_static(ctx.dims(0)):
        ctx.refuse("it squeezes all axes of size 1, which are known at run time only; give it axes")
    ones = [axis + 1 for axis, size in enumerate(ctx.dims(0)) if size == 1]
    return ctx.same(ctx.value(0), np.array(ones, np.int64)) if ones else [ctx.value(0)]
