"""Operators on images that treat each example by itself: the lanes join the batch."""

from __future__ import annotations

import numpy as np

from archipel.autodiff.batching.context import LaneContext
from archipel.autodiff.batching.table import BatchedResults, batch_rule
from archipel.graph.shapes import static_size


@batch_rule(
    "AveragePool", "Col2Im", "ConvInteger", "DepthToSpace", "GlobalAveragePool", "GlobalLpPool", "GlobalMaxPool", "LRN",
    "LpPool", "QLinearConv", "SpaceToDepth",
)  # fmt: skip
def in_batch(ctx: LaneContext) -> BatchedResults:
    others = ctx.values()[1:]
    if ctx.batched(*range(1, 1 + len(others))):
        return []
    return [ctx.part(ctx.same(ctx.join(0), *others)[0], ctx.size(0, 0))]


@batch_rule("GridSample")
def grid_sample(ctx: LaneContext) -> BatchedResults:
    return [ctx.part(ctx.same(ctx.join(0), ctx.join(1))[0], ctx.size(0, 0))]


@batch_rule("MaxPool")
def max_pool(ctx: LaneContext) -> BatchedResults:
    op, batch = ctx.op, ctx.size(0, 0)
    indexed = ctx.used(1)
    found = ctx.same(ctx.join(0), outputs=2 if indexed else 1)
    if not indexed:
        return [ctx.part(found[0], batch)]
    # The indices count through the whole tensor, so a lane's begin where the lanes before end.
    known = static_size(ctx.dims(0))
    length = np.array(known) if known is not None else op.ReduceProd(op.Shape(ctx.value(0), start=1), [0], keepdims=0)
    begin = op.Mul(ctx.positions(ctx.rank(0)), length)
    return [ctx.part(found[0], batch), op.Sub(ctx.part(found[1], batch), begin)]


@batch_rule("Resize")
def resize(ctx: LaneContext) -> BatchedResults:
    rank, batch = ctx.rank(0), ctx.dims(0)[0] if ctx.rank(0) else None
    plain = ctx.attribute("coordinate_transformation_mode", "half_pixel") != "tf_crop_and_resize"
    axes, scales, sizes = ctx.attribute("axes", None), ctx.constant(2), ctx.constant(3)
    inputs = ctx.values()
    if not ctx.batched(0) or not plain or rank == 0:
        return []
    if axes is not None:
        if 0 in (axis % rank for axis in axes):
            return []
    elif scales is not None and scales.size:
        if scales[0] != 1:
            return []
    elif sizes is not None and sizes[0] == batch and ctx.attribute("keep_aspect_ratio_policy", "stretch") == "stretch":
        # The batch is not resized: it is longer now.
        inputs[3], axes = ctx.op.constant(sizes[1:]), list(range(1, rank))
    else:
        return []
    return [ctx.part(ctx.same(ctx.join(0), *inputs[1:], axes=axes)[0], ctx.size(0, 0))]
