"""Normalization. Scale and bias that differ from lane to lane are applied behind the operator."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from archipel.autodiff.batching.context import LaneContext
from archipel.autodiff.batching.rules.axes import behind
from archipel.autodiff.batching.table import BatchedResults, batch_rule
from archipel.graph.shapes import dims, dtype_of, static_size


@batch_rule("LayerNormalization")
def layer_norm(ctx: LaneContext) -> BatchedResults:
    op, rank = ctx.op, ctx.rank(0)
    axis = behind(ctx.attribute("axis", -1)) if ctx.batched(0) else ctx.attribute("axis", -1)
    count = max(i for i in range(3) if i == 0 or ctx.used(i)) + 1
    if not ctx.batched(1, 2):
        return ctx.same(*ctx.values(), axis=axis, outputs=count)
    value, *rest = ctx.same(ctx.value(0), _filled(ctx, 1.0), axis=axis, outputs=count)
    value = op.Mul(value, ctx.aligned(1, rank))
    if ctx.has(2):
        value = op.Add(value, ctx.aligned(2, rank))
    # Mean and deviation do not depend on scale and bias.
    others = rest if ctx.batched(0) else [ctx.sweep.repeat(result) for result in rest]
    return [value, *others]


@batch_rule("InstanceNormalization", "GroupNormalization")
def group_norm(ctx: LaneContext) -> BatchedResults:
    op, plain = ctx.op, not ctx.batched(1, 2)
    data = ctx.join(0) if ctx.batched(0) else ctx.value(0)
    settings = ctx.values()[1:] if plain else [_filled(ctx, 1.0), _filled(ctx, 0.0)]
    value = ctx.same(data, *settings)[0]
    value.shape = data.shape  # inference does not know it
    if ctx.batched(0):
        value = ctx.part(value, ctx.size(0, 0))
    return [value if plain else op.Add(op.Mul(value, by_channel(ctx, 1)), by_channel(ctx, 2))]


def _filled(ctx: LaneContext, fill: float) -> ir.Value:
    """A scale or bias of one lane, without effect."""
    like, dtype = ctx.input(1), dtype_of(ctx.input(1))
    if static_size(dims(like)) is not None:
        return ctx.op.constant(np.full(dims(like), fill, dtype.numpy()))
    content = ir.tensor(np.array([fill], dtype.numpy()))
    start = 1 if ctx.batched(1) else 0
    value = ctx.op.ConstantOfShape(ctx.op.Shape(ctx.value(1), start=start), value=content)
    value.shape = like.shape
    return value


def by_channel(ctx: LaneContext, index: int) -> ir.Value:
    """A parameter [channels] for broadcasting with [lanes, batch, channels, ...]."""
    value, spatial = ctx.value(index), ctx.rank(0) - 2
    if ctx.batched(index):
        return ctx.op.Unsqueeze(value, [1, *range(3, 3 + spatial)])
    return ctx.op.Unsqueeze(value, list(range(1, 1 + spatial))) if spatial else value


@batch_rule("BatchNormalization")
def batch_norm(ctx: LaneContext) -> BatchedResults:
    op, parameters = ctx.op, range(1, 5)
    if ctx.attribute("training_mode", 0):
        # The statistics are over a lane's batch alone, so the lanes are channels.
        channels = ctx.size(1, 0)
        found = ctx.same(ctx.join(0, 1), *(ctx.join(i) for i in parameters))
        return [ctx.part(found[0], channels, 1), *(ctx.part(value, channels) for value in found[1:])]
    if not ctx.batched(*parameters):
        return [ctx.part(ctx.same(ctx.join(0), *ctx.values()[1:], outputs=1)[0], ctx.size(0, 0))]
    if len({ctx.input(i).dtype for i in range(5)}) > 1:
        return []
    scale, bias, mean, variance = (by_channel(ctx, i) for i in parameters)
    factor = op.Div(scale, op.Sqrt(op.Add(variance, float(ctx.attribute("epsilon", 1e-5)))))
    return [op.Add(op.Mul(op.Sub(ctx.value(0), mean), factor), bias)]
