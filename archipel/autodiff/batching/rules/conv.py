"""Convolutions: lanes of the data join the batch, lanes of the weight the channels, as groups."""

from __future__ import annotations

import onnx_ir as ir

from archipel.autodiff.batching.context import LaneContext
from archipel.autodiff.batching.table import BatchedResults, batch_rule


@batch_rule("Conv", "ConvTranspose")
def convolution(ctx: LaneContext) -> BatchedResults:
    transposed = ctx.node.op_type == "ConvTranspose"
    group: int = ctx.attribute("group", 1)
    channels = ctx.size(1, 1) if transposed else ctx.size(1, 0)
    if not isinstance(channels, int):
        return []
    channels = channels * group if transposed else channels
    bias = ctx.value(2) if ctx.has(2) else None
    if not ctx.batched(1):
        shared = None if ctx.batched(2) else bias
        if ctx.batched(0):
            value = ctx.part(ctx.same(ctx.join(0), ctx.value(1), shared)[0], ctx.size(0, 0))
        else:
            value = ctx.same(ctx.value(0), ctx.value(1), shared)[0]
        return [_with_bias(ctx, value) if ctx.batched(2) else value]
    if not ctx.batched(0) and group == 1:
        # All filters see the same data: more filters. Those of a transposed convolution are its second axis.
        value = ctx.same(ctx.value(0), ctx.join(1, 1 if transposed else 0))[0]
    elif isinstance(ctx.lanes, int):
        value = ctx.same(ctx.join(0, 1), ctx.join(1), group=group * ctx.lanes)[0]
    else:
        return []  # the number of groups is an attribute
    value = ctx.part(value, channels, 1)
    return [value if bias is None else _with_bias(ctx, value)]


def _with_bias(ctx: LaneContext, value: ir.Value) -> ir.Value:
    """[lanes, batch, channels, ...] plus a bias [channels] or [lanes, channels]."""
    spatial = ctx.rank(0) - 2
    batched = ctx.batched(2)
    axes = [*([1] if batched else []), *(range(3, 3 + spatial) if batched else range(1, 1 + spatial))]
    bias = ctx.value(2)
    return ctx.op.Add(value, ctx.op.Unsqueeze(bias, axes) if axes else bias)
