"""Running sums."""

from __future__ import annotations

from archipel.autodiff.context import RuleContext
from archipel.autodiff.registry import Gradients, rule


@rule("", "CumSum")
def cum_sum(ctx: RuleContext) -> Gradients:
    """y_i = sum of x_j, j <= i: dx_j = sum of g_i, i >= j, which is a running sum from the other end (ONNX CumSum-14).

    `exclusive` leaves out i = j in both.
    """
    exclusive, reverse = ctx.attribute("exclusive", 0), ctx.attribute("reverse", 0)
    return [ctx.op.CumSum(ctx.cotangent, ctx.input(1), exclusive=exclusive, reverse=1 - reverse)]
