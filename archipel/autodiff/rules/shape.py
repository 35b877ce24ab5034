"""Moving, repeating and retyping elements."""

from __future__ import annotations

from archipel.autodiff.context import RuleContext
from archipel.autodiff.registry import Gradients, rule
from archipel.graph.shapes import dtype_of, rank


@rule("", "Identity")
def identity(ctx: RuleContext) -> Gradients:
    return [ctx.cotangent]


@rule("", "Cast")
def cast(ctx: RuleContext) -> Gradients:
    x = ctx.input(0)
    if dtype_of(x) == dtype_of(ctx.output):
        return [ctx.cotangent]
    return [ctx.op.Cast(ctx.cotangent, to=int(dtype_of(x)))]


@rule("", "Reshape", "Flatten", "Squeeze", "Unsqueeze")
def reshape(ctx: RuleContext) -> Gradients:
    return [ctx.op.reshape_like(ctx.cotangent, ctx.input(0))]


@rule("", "Transpose")
def transpose(ctx: RuleContext) -> Gradients:
    n = rank(ctx.input(0))
    perm = ctx.attribute("perm", list(reversed(range(n))))
    return [ctx.op.Transpose(ctx.cotangent, perm=[perm.index(axis) for axis in range(n)])]


@rule("", "Expand")
def expand(ctx: RuleContext) -> Gradients:
    return [ctx.op.sum_to(ctx.cotangent, ctx.input(0))]
