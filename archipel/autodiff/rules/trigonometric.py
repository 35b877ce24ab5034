"""Tangent, inverse and hyperbolic functions: dx = g f'(x), with g the cotangent of y = f(x). The formulas are f'(x)."""

from __future__ import annotations

import onnx_ir as ir

from archipel.autodiff.context import RuleContext
from archipel.autodiff.registry import Gradients, rule
from archipel.graph.build import Builder


@rule("", "Tan")
def tan(ctx: RuleContext) -> Gradients:
    """1 + y^2."""
    op, g, y = ctx.op, ctx.cotangent, ctx.output
    return [op.Add(g, op.Mul(g, op.Mul(y, y)))]


@rule("", "Asin")
def asin(ctx: RuleContext) -> Gradients:
    """1 / sqrt(1 - x^2)."""
    return [_over_root(ctx, _product(ctx.op, ctx.input(0)))]


@rule("", "Acos")
def acos(ctx: RuleContext) -> Gradients:
    """-1 / sqrt(1 - x^2)."""
    return [ctx.op.Neg(_over_root(ctx, _product(ctx.op, ctx.input(0))))]


@rule("", "Atan")
def atan(ctx: RuleContext) -> Gradients:
    """1 / (1 + x^2)."""
    op, x = ctx.op, ctx.input(0)
    return [op.Div(ctx.cotangent, op.Add(op.Mul(x, x), 1.0))]


@rule("", "Sinh")
def sinh(ctx: RuleContext) -> Gradients:
    """cosh x."""
    return [ctx.op.Mul(ctx.cotangent, ctx.op.Cosh(ctx.input(0)))]


@rule("", "Cosh")
def cosh(ctx: RuleContext) -> Gradients:
    """sinh x."""
    return [ctx.op.Mul(ctx.cotangent, ctx.op.Sinh(ctx.input(0)))]


@rule("", "Asinh")
def asinh(ctx: RuleContext) -> Gradients:
    """1 / sqrt(x^2 + 1)."""
    op, x = ctx.op, ctx.input(0)
    return [_over_root(ctx, op.Add(op.Mul(x, x), 1.0))]


@rule("", "Acosh")
def acosh(ctx: RuleContext) -> Gradients:
    """1 / sqrt(x^2 - 1)."""
    return [_over_root(ctx, ctx.op.Neg(_product(ctx.op, ctx.input(0))))]


@rule("", "Atanh")
def atanh(ctx: RuleContext) -> Gradients:
    """1 / (1 - x^2)."""
    return [ctx.op.Div(ctx.cotangent, _product(ctx.op, ctx.input(0)))]


def _product(op: Builder, x: ir.Value) -> ir.Value:
    """1 - x^2 as (1 - x) (1 + x), which keeps its digits near 1 and -1."""
    return op.Mul(op.Sub(1.0, x), op.Add(x, 1.0))


def _over_root(ctx: RuleContext, square: ir.Value) -> ir.Value:
    return ctx.op.Div(ctx.cotangent, ctx.op.Sqrt(square))
