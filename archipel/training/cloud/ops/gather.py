"""Looking up and slicing."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from archipel.training.cloud.ops.context import NodeContext
from archipel.training.cloud.ops.table import lowering


@lowering("Gather")
def gather(ctx: NodeContext) -> torch.Tensor:
    data, axis = ctx.tensor(0), ctx.axis("axis", 0)
    indices = ctx.constant(1)
    if indices is not None and indices.numel() == 1 and ctx.rank(1) == 0:
        return data.select(axis, int(indices.item()))
    index = from_end(ctx, 1, ctx.size(0, axis))
    if axis == 0 and ctx.rank() == 2:
        return functional.embedding(index, data)
    rank = ctx.rank(1)
    if rank == 1:
        return data.index_select(axis, index)
    sizes = [ctx.size(0, i) for i in range(ctx.rank())]
    picked = data.index_select(axis, index.reshape(-1))
    return picked.reshape([*sizes[:axis], *[ctx.size(1, i) for i in range(rank)], *sizes[axis + 1 :]])


def from_end(ctx: NodeContext, index: int, size: Any) -> torch.Tensor:
    """The input as int64 indices from 0; negative ones count from the end."""
    constant = ctx.constant(index)
    found = ctx.tensor(index).to(torch.int64)
    if constant is not None and bool((constant >= 0).all()):
        return found
    return torch.where(found < 0, found + size, found)


@lowering("Slice")
def slice_(ctx: NodeContext) -> torch.Tensor:
    x = ctx.tensor(0)
    starts, ends = ctx.sizes(1), ctx.sizes(2)
    axes = ctx.fixed(3) if ctx.has(3) else list(range(len(starts)))
    steps = ctx.fixed(4) if ctx.has(4) else [1] * len(starts)
    for start, end, axis, step in zip(starts, ends, axes, steps):
        axis = axis + ctx.rank() if axis < 0 else axis
        if step > 0 and isinstance(start, int) and isinstance(end, int):
            x = x[(*[slice(None)] * axis, slice(start, min(end, 2**63 - 1), step))]
        elif step > 0:
            x = ctx.call(_cut, x, axis, start, end, step)
        else:
            x = ctx.call(_cut_backwards, x, axis, start, end, step)
    return x


def _cut(x: torch.Tensor, axis: int, start: int, end: int, step: int) -> torch.Tensor:
    return x[(*[slice(None)] * axis, slice(start, end, step))]


def _cut_backwards(x: torch.Tensor, axis: int, start: int, end: int, step: int) -> torch.Tensor:
    """PyTorch has no negative steps: forwards over the flipped axis."""
    size = x.size(axis)
    first = min(start + size if start < 0 else start, size - 1)
    last = max(end + size if end < 0 else end, -1)
    if end < -size:
        last = -1
    flipped = x.flip(axis)
    return flipped[(*[slice(None)] * axis, slice(size - 1 - first, size - 1 - last, -step))]
