"""Arithmetic, comparisons, logic and functions of single elements, with broadcasting."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import torch

from archipel.training.cloud.ops.context import NodeContext
from archipel.training.cloud.ops.table import LOWERINGS, lowering
from archipel.training.cloud.ops.types import torch_dtype, wrap

_UNARY: dict[str, Callable[..., torch.Tensor]] = {
    "Abs": torch.abs,
    "Acos": torch.acos,
    "Acosh": torch.acosh,
    "Asin": torch.asin,
    "Asinh": torch.asinh,
    "Atan": torch.atan,
    "Atanh": torch.atanh,
    "BitwiseNot": torch.bitwise_not,
    "Ceil": torch.ceil,
    "Cos": torch.cos,
    "Cosh": torch.cosh,
    "Erf": torch.erf,
    "Exp": torch.exp,
    "Floor": torch.floor,
    "IsNaN": torch.isnan,
    "Log": torch.log,
    "Neg": torch.neg,
    "Not": torch.logical_not,
    "Reciprocal": torch.reciprocal,
    "Round": torch.round,  # half to even, as ONNX
    "Sign": torch.sign,
    "Sin": torch.sin,
    "Sinh": torch.sinh,
    "Sqrt": torch.sqrt,
    "Tan": torch.tan,
    "Tanh": torch.tanh,
}

_BINARY: dict[str, Callable[..., torch.Tensor]] = {
    "Add": operator.add,
    "And": torch.logical_and,
    "BitwiseAnd": torch.bitwise_and,
    "BitwiseOr": torch.bitwise_or,
    "BitwiseXor": torch.bitwise_xor,
    "Equal": torch.eq,
    "Greater": torch.gt,
    "GreaterOrEqual": torch.ge,
    "Less": torch.lt,
    "LessOrEqual": torch.le,
    "Mul": operator.mul,
    "Or": torch.logical_or,
    "Sub": operator.sub,
    "Xor": torch.logical_xor,
}

_TENSORS_ONLY = frozenset({"And", "Or", "Xor"})


def _unary(function: Callable[..., torch.Tensor], ctx: NodeContext) -> torch.Tensor:
    return wrap(function(ctx.tensor(0)), ctx.output_type())


def _binary(function: Callable[..., torch.Tensor], ctx: NodeContext) -> torch.Tensor:
    a, b = operands(ctx, numbers=ctx.node.op_type not in _TENSORS_ONLY)
    return wrap(function(a, b), ctx.output_type())


LOWERINGS.update({("", name): functools.partial(_unary, function) for name, function in _UNARY.items()})
LOWERINGS.update({("", name): functools.partial(_binary, function) for name, function in _BINARY.items()})


def operands(ctx: NodeContext, numbers: bool = True) -> tuple[Any, Any]:
    """Both inputs of an operator that broadcasts; a constant of one element as a number, where that is the same."""
    ranks = ctx.rank(0), ctx.rank(1)
    if numbers and ranks[1] <= ranks[0]:
        b = ctx.operand(1)
        return ctx.tensor(0), b
    if numbers and ranks[0] < ranks[1] and ctx.constant(0) is not None and ctx.node.op_type in ("Add", "Mul", "Sub"):
        return ctx.operand(0), ctx.tensor(1)
    return ctx.tensor(0), ctx.tensor(1)


@lowering("Div")
def div(ctx: NodeContext) -> torch.Tensor:
    a, b = operands(ctx)
    if ctx.onnx_dtype().is_floating_point():
        return a / b  # type: ignore[no-any-return]
    return torch.div(a, b, rounding_mode="trunc")


@lowering("Mod")
def mod(ctx: NodeContext) -> torch.Tensor:
    # fmod has the sign of the dividend, as C has it; Mod of integers that of the divisor, as Python has it.
    a, b = operands(ctx)
    return torch.fmod(a, b) if ctx.integer("fmod", 0) else torch.remainder(a, b)


@lowering("Pow")
def power(ctx: NodeContext) -> torch.Tensor:
    exponent = ctx.constant(1)
    x = ctx.tensor(0)
    if exponent is not None and exponent.numel() == 1 and ctx.rank(1) <= ctx.rank(0):
        number = exponent.item()
        if not ctx.onnx_dtype().is_floating_point():
            number = int(number)
        return torch.pow(x, number)
    return torch.pow(x, ctx.tensor(1)).to(ctx.dtype())


@lowering("BitShift")
def bit_shift(ctx: NodeContext) -> torch.Tensor:
    a, b = operands(ctx)
    if ctx.text("direction", "") == "LEFT":
        return wrap(torch.bitwise_left_shift(a, b), ctx.output_type())
    if ctx.onnx_dtype() is ir.DataType.UINT64:
        a, b = ctx.tensors()
        # int64 holds these bits, and its shift would repeat the sign.
        return torch.where(b > 0, torch.bitwise_right_shift(a, b) & ~(-1 << (64 - b)), a)
    return torch.bitwise_right_shift(a, b)


@lowering("Cast", "CastLike")
def cast(ctx: NodeContext) -> torch.Tensor:
    to = ctx.output_type()
    source = ctx.onnx_dtype()
    x = ctx.tensor(0)
    if source == to:
        return x
    if source.is_floating_point() and to in (ir.DataType.UINT16, ir.DataType.UINT32):
        return wrap(x.to(torch.int64), to).to(torch_dtype(to))
    return wrap(x.to(torch_dtype(to)), to)


@lowering("IsInf")
def is_inf(ctx: NodeContext) -> torch.Tensor:
    x = ctx.tensor(0)
    positive, negative = ctx.integer("detect_positive", 1), ctx.integer("detect_negative", 1)
    if positive and negative:
        return torch.isinf(x)
    if positive:
        return torch.isposinf(x)
    return torch.isneginf(x) if negative else torch.zeros_like(x, dtype=torch.bool)


@lowering("Where")
def where(ctx: NodeContext) -> torch.Tensor:
    a, b = ctx.tensor(1), ctx.tensor(2)
    return torch.where(ctx.tensor(0), a, b)


@lowering("Max")
def maximum(ctx: NodeContext) -> torch.Tensor:
    return functools.reduce(torch.maximum, ctx.tensors())


@lowering("Min")
def minimum(ctx: NodeContext) -> torch.Tensor:
    return functools.reduce(torch.minimum, ctx.tensors())


@lowering("Sum")
def total(ctx: NodeContext) -> torch.Tensor:
    return functools.reduce(operator.add, ctx.tensors())


@lowering("Mean")
def mean(ctx: NodeContext) -> torch.Tensor:
    return torch.div(total(ctx), len(ctx.node.inputs))
