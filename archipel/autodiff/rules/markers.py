"""The markers: what a gradient does where it passes them. A stopped gradient needs no rule: nothing asks for it."""

from __future__ import annotations

from archipel.autodiff.context import ForwardContext, RuleContext
from archipel.autodiff.registry import Gradients, Tangents, forward_rule, rule
from archipel.graph.markers import CLIP, DOMAIN, STOP, STRAIGHT


@rule(DOMAIN, STOP)
def stop(ctx: RuleContext) -> Gradients:
    return [None]


@rule(DOMAIN, STRAIGHT)
def straight_through(ctx: RuleContext) -> Gradients:
    """Of (x, y) -> y: x gets the whole gradient (Bengio et al. 2013, section 3)."""
    return [ctx.cotangent]


@rule(DOMAIN, CLIP)
def clip(ctx: RuleContext) -> Gradients:
    """By value: each element into [-limit, limit]. By norm: scaled down to a Euclidean norm of at most the limit
    (Pascanu et al. 2013, algorithm 1)."""
    op, g, limit = ctx.op, ctx.cotangent, float(ctx.attribute("limit", 1.0))
    if ctx.attribute("by", "value") == "value":
        return [op.Clip(g, -limit, limit)]
    # The larger one of the squares: at a gradient of zero the root has a derivative.
    square = op.ReduceSum(op.Mul(g, g), keepdims=0)
    return [op.Mul(g, op.Div(op.constant(limit, g.dtype), op.Sqrt(op.Max(square, limit * limit))))]


@forward_rule(DOMAIN, CLIP)
def push_clip(ctx: ForwardContext) -> Tangents:
    """Tangents are not clipped: they are no gradients."""
    return [ctx.tangent(0)]
