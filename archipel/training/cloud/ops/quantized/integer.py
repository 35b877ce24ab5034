"""Products and convolutions of integers, as quantized models have them; no gradient passes through.

They are computed in float64, which is exact for them and faster than PyTorch's integers, which a GPU does not have.
"""

from __future__ import annotations

from typing import Any

import torch

from archipel.training.cloud.ops.context import NodeContext
from archipel.training.cloud.ops.spatial.conv import convolve
from archipel.training.cloud.ops.table import lowering
from archipel.training.cloud.ops.types import torch_dtype

_EXACT = torch.float64


@lowering("MatMulInteger")
def matmul_integer(ctx: NodeContext) -> torch.Tensor:
    return torch.matmul(_row_wise(ctx, 0, 2), _centred(ctx, 1, 3)).to(torch.int32)


@lowering("ConvInteger")
def conv_integer(ctx: NodeContext) -> torch.Tensor:
    return convolve(ctx, _centred(ctx, 0, 2), _kernel(ctx, 1, 3), None, 1).to(torch.int32)


@lowering("QLinearMatMul")
def quantized_matmul(ctx: NodeContext) -> torch.Tensor:
    total = torch.matmul(_row_wise(ctx, 0, 2), _centred(ctx, 3, 5))
    return _requantize(ctx, total, _along(ctx, ctx.tensor(1), 1, ctx.rank()) * ctx.tensor(4), 6)


@lowering("QLinearConv")
def quantized_conv(ctx: NodeContext) -> torch.Tensor:
    bias = ctx.tensor(8).to(_EXACT) if ctx.has(8) else None
    total = convolve(ctx, _centred(ctx, 0, 2), _kernel(ctx, 3, 5), bias, 3)
    scale = ctx.tensor(4).reshape([-1, *[1] * (ctx.rank() - 2)])
    return _requantize(ctx, total, ctx.tensor(1) * scale, 6)


def _centred(ctx: NodeContext, index: int, zero: int) -> torch.Tensor:
    """The input minus its zero point, which broadcasts."""
    x = ctx.tensor(index).to(_EXACT)
    return x - ctx.tensor(zero).to(_EXACT) if ctx.has(zero) else x


def _row_wise(ctx: NodeContext, index: int, zero: int) -> torch.Tensor:
    """A left operand, with one zero point for all, or one for each row."""
    x = ctx.tensor(index).to(_EXACT)
    return x - _along(ctx, ctx.tensor(zero).to(_EXACT), zero, ctx.rank(index)) if ctx.has(zero) else x


def _along(ctx: NodeContext, value: torch.Tensor, index: int, rank: int) -> torch.Tensor:
    """A value for each row so that it broadcasts: one of rank 1 gets an axis behind it."""
    return value.unsqueeze(-1) if ctx.rank(index) == 1 and rank > 1 and ctx.dims(index) != (1,) else value


def _kernel(ctx: NodeContext, index: int, zero: int) -> torch.Tensor:
    """Weights of a convolution, with one zero point for all, or one for each output channel."""
    w = ctx.tensor(index).to(_EXACT)
    if not ctx.has(zero):
        return w
    return w - ctx.tensor(zero).to(_EXACT).reshape([-1, *[1] * (ctx.rank(index) - 1)])


def _requantize(ctx: NodeContext, total: torch.Tensor, scale: Any, index: int) -> torch.Tensor:
    """The sums in steps of the output's scale, input `index`, around its zero point, the input behind it."""
    kind = ctx.output_type()
    # In float32, as runtimes compute it: which way a half is rounded depends on the last bit.
    steps = torch.round(total.to(torch.float32) * (scale / ctx.tensor(index))) + ctx.tensor(index + 1)
    return torch.clamp(steps, int(kind.min), int(kind.max)).to(torch_dtype(kind))
