"""Running sums."""

from __future__ import annotations

from archipel.autodiff.context import RuleContext
from archipel.autodiff.registry import Gradients, rule


@rule("", "CumSum")
def cum_sum(ctx: RuleContext) -> Gradients:
    """Each element reaches the sums that start at it: a running sum from the other end."""
    exclusive, reverse = ctx.attribute("exclusive", 0), ctx.attribute("reverse", 0)
    return [ctx.op.CumSum(ctx.cotangent, ctx.input(1), exclusive=exclusive, reverse=1 - reverse)]
