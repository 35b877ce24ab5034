"""Operators that put tensors together and take them apart along an axis."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from archipel.autodiff.batching.context import LaneContext
from archipel.autodiff.batching.rules.axes import behind
from archipel.autodiff.batching.rules.reduce import shifted, shifted_at_runtime
from archipel.autodiff.batching.table import BatchedResults, batch_rule
from archipel.graph.build import Operand
from archipel.graph.shapes import dims


@batch_rule("Concat")
def concat(ctx: LaneContext) -> BatchedResults:
    parts = [ctx.spread(i) for i in range(len(ctx.node.inputs))]
    return ctx.same(*parts, axis=behind(ctx.attribute("axis", 0)))


@batch_rule("Split")
def split(ctx: LaneContext) -> BatchedResults:
    return ctx.same(*ctx.values(), axis=behind(ctx.attribute("axis", 0)))


@batch_rule("Slice")
def slice_(ctx: LaneContext) -> BatchedResults:
    if ctx.batched(1, 2):
        return []
    inputs: list[Operand] = list(ctx.values())
    if ctx.has(3):
        inputs[3] = _moved(ctx, 3)
    else:
        length = dims(ctx.input(1))[0]
        if not isinstance(length, int):
            return []
        kind = ctx.input(1).dtype or ir.DataType.INT64
        inputs[3:4] = [np.arange(1, length + 1, dtype=kind.numpy())]
    return ctx.same(*inputs)


@batch_rule("Pad")
def pad(ctx: LaneContext) -> BatchedResults:
    if ctx.batched(2):
        return []
    axes = _moved(ctx, 3) if ctx.has(3) else np.arange(1, ctx.rank(0) + 1)
    return ctx.same(*[*ctx.values(), None][:3], axes) if ctx.rank(0) else []


def _moved(ctx: LaneContext, index: int) -> Operand:
    axes = ctx.constant(index)
    return shifted_at_runtime(ctx, ctx.value(index)) if axes is None else shifted(axes).astype(axes.dtype)
