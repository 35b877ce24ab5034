"""Arithmetic, element by element, with broadcasting."""

from __future__ import annotations

from archipel.autodiff.context import RuleContext
from archipel.autodiff.registry import Gradients, rule


@rule("", "Add")
def add(ctx: RuleContext) -> Gradients:
    g = ctx.cotangent
    return [ctx.op.sum_to(g, ctx.input(0)), ctx.op.sum_to(g, ctx.input(1))]


@rule("", "Sub")
def sub(ctx: RuleContext) -> Gradients:
    g = ctx.cotangent
    return [ctx.op.sum_to(g, ctx.input(0)), ctx.op.Neg(ctx.op.sum_to(g, ctx.input(1)))]


@rule("", "Mul")
def mul(ctx: RuleContext) -> Gradients:
    op, g, a, b = ctx.op, ctx.cotangent, ctx.input(0), ctx.input(1)
    return [
        op.sum_to(op.Mul(g, b), a) if ctx.wants(0) else None,
        op.sum_to(op.Mul(g, a), b) if ctx.wants(1) else None,
    ]


@rule("", "Div")
def div(ctx: RuleContext) -> Gradients:
    op, a, b = ctx.op, ctx.input(0), ctx.input(1)
    scaled = op.Div(ctx.cotangent, b)
    return [
        op.sum_to(scaled, a) if ctx.wants(0) else None,
        op.Neg(op.sum_to(op.Mul(scaled, ctx.output), b)) if ctx.wants(1) else None,
    ]


@rule("", "Neg")
def neg(ctx: RuleContext) -> Gradients:
    return [ctx.op.Neg(ctx.cotangent)]


@rule("", "Exp")
def exp(ctx: RuleContext) -> Gradients:
    return [ctx.op.Mul(ctx.cotangent, ctx.output)]


@rule("", "Log")
def log(ctx: RuleContext) -> Gradients:
    return [ctx.op.Div(ctx.cotangent, ctx.input(0))]


@rule("", "Sqrt")
def sqrt(ctx: RuleContext) -> Gradients:
    return [ctx.op.Div(ctx.op.Mul(ctx.cotangent, 0.5), ctx.output)]
