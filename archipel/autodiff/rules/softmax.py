"""Softmax and its logarithm, along one axis."""

from __future__ import annotations

from archipel.autodiff.context import RuleContext
from archipel.autodiff.registry import Gradients, rule


@rule("", "Softmax")
def softmax(ctx: RuleContext) -> Gradients:
    op, g, y = ctx.op, ctx.cotangent, ctx.output
    inner = op.ReduceSum(op.Mul(g, y), [ctx.attribute("axis", -1)], keepdims=1)
    return [op.Mul(y, op.Sub(g, inner))]


@rule("", "LogSoftmax")
def log_softmax(ctx: RuleContext) -> Gradients:
    op, g = ctx.op, ctx.cotangent
    total = op.ReduceSum(g, [ctx.attribute("axis", -1)], keepdims=1)
    return [op.Sub(g, op.Mul(op.Exp(ctx.output), total))]
