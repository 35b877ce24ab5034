"""Quantization, differentiated straight through as in `autodiff/rules/quantization.py`.

PyTorch's integers have no gradient. So what QuantizeLinear gives are whole numbers in a floating-point type, which
DequantizeLinear reads as they are and every other operator as integers (`NodeContext.as_integer`).
"""

from __future__ import annotations

from typing import Any

import torch

from archipel.training.cloud.ops.context import NodeContext
from archipel.training.cloud.ops.table import lowering
from archipel.training.cloud.ops.types import torch_dtype


class _Rounding(torch.autograd.Function):
    """Rounds half to even; its gradient is that of the identity (Bengio et al. 2013, section 3)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return torch.round(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        """Nothing has to be kept."""

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


def round_straight(x: torch.Tensor) -> torch.Tensor:
    return _Rounding.apply(x)  # type: ignore[no-any-return, no-untyped-call]


@lowering("QuantizeLinear")
def quantize_linear(ctx: NodeContext) -> torch.Tensor:
    kind = ctx.output_type()
    x, scale = ctx.tensor(0), _spread(ctx, ctx.tensor(1))
    if not ctx.onnx_dtype().is_floating_point():
        x = x.to(ctx.dtype(1))
    steps = ctx.call(round_straight, x / scale)
    if ctx.has(2):
        steps = steps + _spread(ctx, ctx.tensor(2).to(ctx.dtype(1)))
    # A gradient where the integer does not saturate.
    return ctx.as_integer(torch.clamp(steps, int(kind.min), int(kind.max)))


@lowering("DequantizeLinear")
def dequantize_linear(ctx: NodeContext) -> torch.Tensor:
    dtype = ctx.dtype(1)
    steps = ctx.real(0).to(dtype)
    if ctx.has(2):
        steps = steps - _spread(ctx, ctx.tensor(2).to(dtype))
    return steps * _spread(ctx, ctx.tensor(1))


@lowering("DynamicQuantizeLinear")
def dynamic_quantize_linear(ctx: NodeContext) -> tuple[torch.Tensor, ...]:
    # Scale and zero point follow from the data, and count as constants in the gradient.
    x = ctx.tensor(0)
    fixed = x.detach()
    low, high = fixed.amin().clamp(max=0.0), fixed.amax().clamp(min=0.0)
    scale = (high - low) / 255
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)  # zeros alone, for which any scale does
    zero = torch.round(torch.clamp(-low / scale, 0, 255))
    steps = ctx.call(round_straight, x / scale) + zero
    return ctx.as_integer(torch.clamp(steps, 0, 255)), scale, zero.to(torch_dtype(ctx.output_type(2)))


def _spread(ctx: NodeContext, value: torch.Tensor) -> torch.Tensor:
    """A scale or zero point so that it broadcasts against input 0: one for the tensor, an axis' position or a block."""
    rank, own = ctx.rank(), ctx.dims(1)
    axis, block = ctx.integer("axis", 1) % max(rank, 1), ctx.integer("block_size", 0)
    if block and own:
        return value.repeat_interleave(block, axis).narrow(axis, 0, ctx.size(0, axis))
    if own == (1,):
        return value.reshape([])
    return value.reshape([-1 if i == axis else 1 for i in range(rank)]) if own else value
