"""Quantization with a scale for each lane, axis or block."""

from __future__ import annotations

import onnx_ir as ir

from archipel.autodiff.batching.context import LaneContext, widened
from archipel.autodiff.batching.rules.axes import behind
from archipel.autodiff.batching.table import BatchedResults, batch_rule


@batch_rule("QuantizeLinear", "DequantizeLinear")
def linear(ctx: LaneContext) -> BatchedResults:
    axis, rank = ctx.attribute("axis", 1), ctx.rank(0)
    settings = range(1, len(ctx.node.inputs))
    blocks = bool(ctx.attribute("block_size", 0))
    one = not blocks and (ctx.rank(1) == 0 or (ctx.dims(1) == (1,) and (axis >= rank or ctx.dims(0)[axis] != 1)))
    if not ctx.batched(*settings) and not blocks:
        return ctx.same(*ctx.values(), axis=None if one else behind(axis))
    # Operators that move elements take no numbers of four bits.
    lanes = {i: _wide(ctx, i) for i in (0, *settings) if ctx.has(i)}
    if blocks:  # the scale has the data's rank
        return [_apply(ctx, lanes, behind(axis))]
    if one:
        flat = {i: value if i == 0 else ctx.reshape(value, ctx.lanes) for i, value in lanes.items()}
        return [_apply(ctx, flat, 0)]
    axis %= rank
    joined = {i: ctx.joined(value, ctx.sizes(i), 0 if i else axis) for i, value in lanes.items()}
    value = _apply(ctx, joined, axis)
    narrow = value.dtype
    value = ctx.part(widened(ctx.op, value), ctx.size(0, axis), axis)
    return [value if value.dtype == narrow else ctx.op.Cast(value, to=int(narrow))] if narrow else [value]


def _wide(ctx: LaneContext, index: int) -> ir.Value:
    value = widened(ctx.op, ctx.value(index))
    return value if ctx.batched(index) else ctx.sweep.repeat(value)


def _apply(ctx: LaneContext, inputs: dict[int, ir.Value], axis: int) -> ir.Value:
    """Emit the operator, with the zero point in its own type again: the type says which integers to quantize to."""
    point = inputs.get(2)
    if ctx.node.op_type == "QuantizeLinear" and point is not None and point.dtype != ctx.input(2).dtype:
        inputs = {**inputs, 2: ctx.op.Cast(point, to=int(ctx.input(2).dtype or 0))}
    return ctx.same(*(inputs.get(i) for i in range(max(inputs) + 1)), axis=axis)[0]
