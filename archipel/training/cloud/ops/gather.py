"""Looking up, slicing and reversing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

from archipel.training.cloud.ops.context import NodeContext
from archipel.training.cloud.ops.table import lowering

_END = 2**62  # behind every axis; PyTorch warns of the smallest int64, which graphs have for "from the start"


@lowering("Gather")
def gather(ctx: NodeContext) -> torch.Tensor:
    data, axis = ctx.tensor(0), ctx.axis("axis", 0)
    indices = ctx.constant(1)
    if indices is not None and indices.numel() == 1 and ctx.rank(1) == 0:
        return data.select(axis, int(indices.item()))
    if ctx.is_size(1):
        return data.select(axis, ctx.sizes(1)[0])
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


@lowering("GatherElements")
def gather_elements(ctx: NodeContext) -> torch.Tensor:
    axis = ctx.axis("axis", 0)
    return ctx.call(_gather_elements, ctx.tensor(0), ctx.tensor(1), axis)  # type: ignore[no-any-return]


def _gather_elements(x: torch.Tensor, indices: torch.Tensor, axis: int) -> torch.Tensor:
    # An index that is the same along an axis has a stride of 0 there (Expand): it is looked at once.
    same = [i for i, step in enumerate(indices.stride()) if step == 0 and i != axis]
    narrow = indices[tuple(slice(1) if i in same else slice(None) for i in range(indices.ndim))].to(torch.int64)
    narrow = torch.where(narrow < 0, narrow + x.size(axis), narrow)
    others = [i for i in range(x.ndim) if i != axis and i not in same]
    rows_alone = others in ([], [0]) and axis + 1 < x.ndim and all(indices.size(i) == x.size(i) for i in same + others)
    if not rows_alone or not x.numel() or not indices.numel():
        return x.gather(axis, narrow.expand(indices.shape))
    # Whole rows behind the axis are copied, in place of element by element.
    sizes, count = x.shape[:axis], x.size(axis)
    starts = torch.arange(math.prod(sizes), device=x.device).reshape(*sizes, 1) * count
    rows = starts + narrow.reshape(*narrow.shape[: axis + 1])
    picked = x.reshape(-1, *x.shape[axis + 1 :]).index_select(0, rows.reshape(-1))
    return picked.reshape(indices.shape)


@lowering("GatherND")
def gather_nd(ctx: NodeContext) -> torch.Tensor:
    return ctx.call(_gather_nd, ctx.tensor(0), ctx.tensor(1), ctx.integer("batch_dims", 0))  # type: ignore[no-any-return]


def _gather_nd(x: torch.Tensor, indices: torch.Tensor, batch: int) -> torch.Tensor:
    depth = indices.shape[-1]
    sizes = x.shape[: batch + depth]
    rows = flat_rows(indices, sizes[batch:])
    # Each batch looks only into its own part.
    for axis in range(batch):
        step = math.prod(sizes[axis + 1 :])
        each = torch.arange(sizes[axis], device=x.device) * step
        rows = rows + each.reshape([-1 if i == axis else 1 for i in range(rows.ndim)])
    # Not x[rows]: its gradient adds up in any order on several threads.
    picked = x.reshape([math.prod(sizes), *x.shape[batch + depth :]]).index_select(0, rows.reshape(-1))
    return picked.reshape([*indices.shape[:-1], *x.shape[batch + depth :]])


def flat_rows(indices: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """Indices `[..., axes]` of a tensor as positions `[...]` in it, were those axes one; negative ones from the end."""
    indices = indices.to(torch.int64)
    rows = torch.zeros(indices.shape[:-1], dtype=torch.int64, device=indices.device)
    for axis, size in enumerate(sizes):
        index = indices.select(-1, axis)
        rows = rows * size + torch.where(index < 0, index + size, index)
    return rows


@lowering("ReverseSequence")
def reverse_sequence(ctx: NodeContext) -> torch.Tensor:
    axes = ctx.axis("batch_axis", 1), ctx.axis("time_axis", 0)
    return ctx.call(_reverse_sequence, ctx.tensor(0), ctx.tensor(1), *axes)  # type: ignore[no-any-return]


def _reverse_sequence(x: torch.Tensor, lengths: torch.Tensor, batch_axis: int, time_axis: int) -> torch.Tensor:
    along = [[-1 if i == axis else 1 for i in range(x.ndim)] for axis in (batch_axis, time_axis)]
    length = lengths.to(torch.int64).reshape(along[0])
    time = torch.arange(x.size(time_axis), device=x.device).reshape(along[1])
    return x.gather(time_axis, torch.where(time < length, length - 1 - time, time).expand(x.shape))


@lowering("Slice")
def slice_(ctx: NodeContext) -> torch.Tensor:
    x = ctx.tensor(0)
    starts, ends = ctx.sizes(1), ctx.sizes(2)
    axes = ctx.sizes(3) if ctx.has(3) else list(range(len(starts)))
    steps = ctx.sizes(4) if ctx.has(4) else [1] * len(starts)
    for start, end, axis, step in zip(starts, ends, axes, steps):
        fixed = isinstance(axis, int) and isinstance(step, int) and step > 0
        if fixed and isinstance(start, int) and isinstance(end, int):
            axis = axis + ctx.rank() if axis < 0 else axis
            x = x[(*[slice(None)] * axis, slice(max(start, -_END), min(end, _END), step))]
        else:
            x = ctx.call(_cut, x, axis, start, end, step)
    return x


def _cut(x: torch.Tensor, axis: int, start: int, end: int, step: int) -> torch.Tensor:
    axis = axis + x.ndim if axis < 0 else axis
    if step < 0:
        return _cut_backwards(x, axis, start, end, step)
    return x[(*[slice(None)] * axis, slice(max(start, -_END), min(end, _END), step))]


def _cut_backwards(x: torch.Tensor, axis: int, start: int, end: int, step: int) -> torch.Tensor:
    """PyTorch has no negative steps: forwards over the flipped axis."""
    size = x.size(axis)
    # ONNX clamps a start to an element, and an end to what lies before the first one.
    first = min(max(start + size if start < 0 else start, 0), size - 1)
    last = min(max(end + size if end < 0 else end, -1), size - 1)
    flipped = x.flip(axis)
    return flipped[(*[slice(None)] * axis, slice(size - 1 - first, size - 1 - last, -step))]
