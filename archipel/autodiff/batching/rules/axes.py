"""Operators along one axis, one place further back with the lanes in front: softmax, ArgMax, CumSum, TopK."""

from __future__ import annotations

import numpy as np

from archipel.autodiff.batching.context import LaneContext
from archipel.autodiff.batching.rules.reduce import shifted, shifted_at_runtime
from archipel.autodiff.batching.table import BatchedResults, batch_rule

# Operator -> the axis that it takes without the attribute.
_DEFAULTS = {
    "Softmax": -1,
    "LogSoftmax": -1,
    "Hardmax": -1,
    "LpNormalization": -1,
    "TopK": -1,
    "ArgMax": 0,
    "ArgMin": 0,
}


@batch_rule(*_DEFAULTS)
def along_axis(ctx: LaneContext) -> BatchedResults:
    axis = ctx.attribute("axis", _DEFAULTS[ctx.node.op_type])
    if ctx.rank(0) == 0:
        return []
    return ctx.same(*ctx.values(), axis=behind(axis))


def behind(axis: int) -> int:
    """An axis of one lane as an axis behind the lanes; one that counts from the end stays."""
    return axis if axis < 0 else axis + 1


@batch_rule("CumSum")
def cumulative(ctx: LaneContext) -> BatchedResults:
    if ctx.batched(1):
        return []
    axis = ctx.constant(1)
    moved = shifted_at_runtime(ctx, ctx.value(1)) if axis is None else np.asarray(shifted(axis), axis.dtype)
    return ctx.same(ctx.value(0), moved)


@batch_rule("OneHot")
def one_hot(ctx: LaneContext) -> BatchedResults:
    if ctx.batched(2):
        return []
    return ctx.same(*ctx.values(), axis=behind(ctx.attribute("axis", -1)))
