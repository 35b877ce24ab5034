"""Pad, in all its modes."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from archipel.training.cloud.ops.context import NodeContext
from archipel.training.cloud.ops.table import lowering


@lowering("Pad")
def pad(ctx: NodeContext) -> torch.Tensor:
    mode, rank, x = ctx.text("mode", "constant"), ctx.rank(), ctx.tensor(0)
    value: Any = 0
    if mode == "constant" and ctx.has(2):
        constant = ctx.constant(2)
        value = ctx.tensor(2) if constant is None else constant.item()
    if ctx.has(3) and ctx.constant(3) is None:
        return ctx.call(_pad_at_runtime, x, ctx.tensor(1), value, ctx.tensor(3), mode)  # type: ignore[no-any-return]
    axes = ctx.fixed(3) if ctx.has(3) else list(range(rank))
    amounts = ctx.sizes(1)
    before, after = [0] * rank, [0] * rank
    for i, axis in enumerate(axes):
        before[axis], after[axis] = amounts[i], amounts[len(axes) + i]
    if mode == "constant":
        return _pad_constant(x, before, after, value)
    for axis in range(rank):
        if not (isinstance(before[axis], int) and before[axis] == 0 and after[axis] == 0):
            x = ctx.call(_repeat, x, axis, before[axis], after[axis], mode)
    return x


def _pad_constant(x: torch.Tensor, before: list[Any], after: list[Any], value: Any) -> torch.Tensor:
    amounts = [number for pair in zip(reversed(before), reversed(after)) for number in pair]
    if isinstance(value, int | float):
        return functional.pad(x, amounts, value=value)
    # A computed value has a gradient.
    inside = functional.pad(torch.ones_like(x, dtype=torch.bool), amounts, value=False)
    return torch.where(inside, functional.pad(x, amounts), value.reshape([]))


def _pad_at_runtime(x: torch.Tensor, pads: torch.Tensor, value: Any, axes: torch.Tensor, mode: str) -> torch.Tensor:
    amounts, chosen = pads.tolist(), axes.tolist()
    before, after = [0] * x.ndim, [0] * x.ndim
    for i, axis in enumerate(chosen):
        before[axis], after[axis] = amounts[i], amounts[len(chosen) + i]
    if mode == "constant":
        return _pad_constant(x, before, after, value)
    for axis in range(x.ndim):
        x = _repeat(x, axis, before[axis], after[axis], mode)
    return x


def _repeat(x: torch.Tensor, axis: int, before: int, after: int, mode: str) -> torch.Tensor:
    """Modes reflect, edge and wrap along one axis."""
    # What negative amounts cut off is no part of what is repeated.
    first = max(-before, 0)
    size = x.size(axis) - first - max(-after, 0)
    at = torch.arange(-max(before, 0), size + max(after, 0), device=x.device)
    if mode == "edge":
        at = at.clamp(0, size - 1)
    elif mode == "wrap":
        at = at % size
    else:
        period = max(2 * (size - 1), 1)
        at = (size - 1) - ((at % period) - (size - 1)).abs()
    return x.index_select(axis, at + first)


@lowering("CenterCropPad")
def center_crop_pad(ctx: NodeContext) -> torch.Tensor:
    rank, x = ctx.rank(), ctx.tensor(0)
    axes = [axis % rank for axis in ctx.integers("axes", list(range(rank)))]
    return ctx.call(_center, x, axes, ctx.sizes(1))  # type: ignore[no-any-return]


def _center(x: torch.Tensor, axes: list[int], sizes: list[int]) -> torch.Tensor:
    amounts = [0] * (2 * x.ndim)
    for axis, size in zip(axes, sizes):
        more = size - x.size(axis)
        # An odd element more lies behind, and is cut off behind.
        first = more // 2 if more >= 0 else -(-more // 2)
        place = 2 * (x.ndim - 1 - axis)
        amounts[place], amounts[place + 1] = first, more - first
    return functional.pad(x, amounts)
