"""Choosing between values."""

from __future__ import annotations

from archipel.autodiff.context import RuleContext
from archipel.autodiff.registry import Gradients, rule


@rule("", "Where")
def where(ctx: RuleContext) -> Gradients:
    op, condition, g = ctx.op, ctx.input(0), ctx.cotangent
    zero = op.constant(0.0, g.dtype)
    return [
        None,
        op.sum_to(op.Where(condition, g, zero), ctx.input(1)) if ctx.wants(1) else None,
        op.sum_to(op.Where(condition, zero, g), ctx.input(2)) if ctx.wants(2) else None,
    ]
