"""Reading at indices: the adjoint adds at the same indices."""

from __future__ import annotations

from archipel.autodiff.context import RuleContext
from archipel.autodiff.registry import Gradients, rule


@rule("", "GatherElements")
def gather_elements(ctx: RuleContext) -> Gradients:
    op, data, indices = ctx.op, ctx.input(0), ctx.input(1)
    zeros = op.full_like(data, 0.0)
    return [op.ScatterElements(zeros, indices, ctx.cotangent, axis=ctx.attribute("axis", 0), reduction="add")]
