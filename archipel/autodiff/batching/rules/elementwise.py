"""Operators that compute each element by itself: ranks are aligned, and broadcasting does the rest."""

from __future__ import annotations

from archipel.autodiff.batching.context import LaneContext
from archipel.autodiff.batching.table import BatchedResults, batch_rule

_UNARY = (
    "Abs Acos Acosh Asin Asinh Atan Atanh BitwiseNot Cast Ceil Celu Cos Cosh Elu Erf Exp Floor Gelu HardSigmoid "
    "HardSwish Identity IsInf IsNaN LeakyRelu Log Mish Neg Not Reciprocal Relu Round Selu Shrink Sigmoid Sign Sin Sinh "
    "Softplus Softsign Sqrt Tan Tanh ThresholdedRelu"
)
# These draw random numbers for every element; a seed attribute draws the same for the whole tensor.
_RANDOM = ("Bernoulli", "RandomNormalLike", "RandomUniformLike")
_BROADCASTING = (
    "Add And BitShift BitwiseAnd BitwiseOr BitwiseXor Div Equal Greater GreaterOrEqual Less LessOrEqual Max Mean Min "
    "Mod Mul Or Pow Sub Sum Where Xor"
)


@batch_rule(*_UNARY.split(), *_RANDOM)
def unary(ctx: LaneContext) -> BatchedResults:
    return ctx.same(ctx.value(0))


@batch_rule(*_BROADCASTING.split())
def broadcasting(ctx: LaneContext) -> BatchedResults:
    rank = max(ctx.rank(i) for i in range(len(ctx.node.inputs)))
    return ctx.same(*(ctx.aligned(i, rank) for i in range(len(ctx.node.inputs))))


@batch_rule("CastLike")
def cast_like(ctx: LaneContext) -> BatchedResults:
    # The second input gives its type only.
    return ctx.same(ctx.spread(0), ctx.value(1))


@batch_rule("PRelu")
def prelu(ctx: LaneContext) -> BatchedResults:
    # Only the slope may be broadcast.
    return ctx.same(ctx.spread(0), ctx.aligned(1, ctx.rank(0)))


@batch_rule("Clip")
def clip(ctx: LaneContext) -> BatchedResults:
    if not ctx.batched(1, 2):
        return ctx.same(*ctx.values())
    # Clip takes bounds that are scalars; Max and Min take tensors. The upper bound counts where they cross.
    value, rank = ctx.value(0), ctx.rank(0)
    for index, op_type in ((1, "Max"), (2, "Min")):
        if ctx.has(index):
            value = ctx.op(op_type, value, ctx.aligned(index, rank))
    return [value]


@batch_rule("Dropout")
def dropout(ctx: LaneContext) -> BatchedResults:
    if ctx.batched(1, 2):
        return []
    return list(ctx.same(*ctx.values()))


@batch_rule("Trilu", "Det")
def last_axes(ctx: LaneContext) -> BatchedResults:
    return [] if ctx.batched(1) else ctx.same(*ctx.values())
