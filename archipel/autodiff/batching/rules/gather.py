"""Indexing: each lane reads and writes its own part."""

from __future__ import annotations

import onnx_ir as ir

from archipel.autodiff.batching.context import LaneContext
from archipel.autodiff.batching.rules.axes import behind
from archipel.autodiff.batching.table import BatchedResults, batch_rule


@batch_rule("Gather")
def gather(ctx: LaneContext) -> BatchedResults:
    op, rank, picked = ctx.op, ctx.rank(0), ctx.rank(1)
    axis = ctx.attribute("axis", 0) % rank
    data, indices = ctx.value(0), ctx.value(1)
    if not ctx.batched(1):
        return ctx.same(data, indices, axis=axis + 1)
    if not ctx.batched(0):
        # The lanes come where the axis was.
        value = ctx.same(data, indices)[0]
        return [op.Transpose(value, perm=_to_front(axis, rank + picked)) if axis else value]
    # With the axis behind the lanes: GatherND with the lanes as batch.
    if axis:
        data = op.Transpose(data, perm=[0, axis + 1, *(i for i in range(1, rank + 1) if i != axis + 1)])
    if indices.dtype != ir.DataType.INT64:
        indices = op.Cast(indices, to=int(ir.DataType.INT64))
    value = op.GatherND(data, op.Unsqueeze(indices, [-1]), batch_dims=1)
    if axis:
        # [lanes, *indices, *before, *behind] to [lanes, *before, *indices, *behind]
        before, end = [*range(1 + picked, 1 + picked + axis)], rank + picked
        value = op.Transpose(value, perm=[0, *before, *range(1, 1 + picked), *range(1 + picked + axis, end)])
    return [value]


def _to_front(axis: int, rank: int) -> list[int]:
    return [axis, *(i for i in range(rank) if i != axis)]


@batch_rule("GatherElements", "ScatterElements")
def elements(ctx: LaneContext) -> BatchedResults:
    inputs = [ctx.spread(i) for i in range(len(ctx.node.inputs))]
    return ctx.same(*inputs, axis=behind(ctx.attribute("axis", 0)))


@batch_rule("GatherND")
def gather_nd(ctx: LaneContext) -> BatchedResults:
    batch = ctx.attribute("batch_dims", 0)
    if not ctx.batched(0) and batch == 0:
        return ctx.same(*ctx.values())
    return ctx.same(ctx.spread(0), ctx.spread(1), batch_dims=batch + 1)


@batch_rule("ScatterND")
def scatter_nd(ctx: LaneContext) -> BatchedResults:
    op, rank = ctx.op, ctx.rank(1)
    indices = ctx.spread(1)
    # It has no batch, so each tuple of indices begins with the number of its lane.
    ones = [ctx.sweep.op.constant([1])]
    shape = op.Concat(op.Shape(indices, end=rank), *ones, axis=0)
    lanes = op.Expand(ctx.positions(rank), shape)
    return ctx.same(ctx.spread(0), op.Concat(lanes, indices, axis=-1), ctx.spread(2))
