"""Operators that change the shape, and move no numbers or copy them."""

from __future__ import annotations

import math
from typing import Any

import torch

from archipel.errors import TrainingError
from archipel.training.cloud.ops.context import NodeContext
from archipel.training.cloud.ops.table import lowering
from archipel.training.cloud.ops.types import torch_dtype


@lowering("Identity")
def identity(ctx: NodeContext) -> torch.Tensor:
    return ctx.tensor(0)


@lowering("Reshape")
def reshape(ctx: NodeContext) -> torch.Tensor:
    sizes, copies = list(ctx.sizes(1)), not ctx.integer("allowzero", 0)
    for axis, size in enumerate(sizes):
        if copies and isinstance(size, int) and size == 0:
            sizes[axis] = ctx.size(0, axis)  # 0 stands for the input's size
    if copies and any(not isinstance(size, int) for size in sizes):
        return ctx.call(_reshape, ctx.tensor(0), sizes)  # type: ignore[no-any-return]
    return ctx.tensor(0).reshape(sizes)


def _reshape(x: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """A size that turns out as 0 stands for the input's, too."""
    return x.reshape([x.size(axis) if size == 0 else size for axis, size in enumerate(sizes)])


@lowering("Flatten")
def flatten(ctx: NodeContext) -> torch.Tensor:
    axis, rank = ctx.axis("axis", 1), ctx.rank()
    sizes = [ctx.size(0, i) for i in range(rank)]
    return ctx.tensor(0).reshape([math.prod(sizes[:axis]), math.prod(sizes[axis:])])


@lowering("Transpose")
def transpose(ctx: NodeContext) -> torch.Tensor:
    rank = ctx.rank()
    order = ctx.integers("perm", list(reversed(range(rank))))
    x = ctx.tensor(0)
    return x.t() if rank == 2 and order == [1, 0] else x.permute(order)


@lowering("Squeeze")
def squeeze(ctx: NodeContext) -> torch.Tensor:
    x = ctx.tensor(0)
    if ctx.has(1):
        return x.squeeze(ctx.sizes(1))
    return x.squeeze([axis for axis, size in enumerate(ctx.dims()) if size == 1])


@lowering("Unsqueeze")
def unsqueeze(ctx: NodeContext) -> torch.Tensor:
    x, axes = ctx.tensor(0), ctx.sizes(1)
    if not all(isinstance(axis, int) for axis in axes):
        return ctx.call(_unsqueeze, x, axes)  # type: ignore[no-any-return]
    return _unsqueeze(x, axes, ctx.rank())


def _unsqueeze(x: torch.Tensor, axes: list[int], rank: int | None = None) -> torch.Tensor:
    total = (x.ndim if rank is None else rank) + len(axes)
    for axis in sorted(axis + total if axis < 0 else axis for axis in axes):
        x = x.unsqueeze(axis)
    return x


@lowering("Expand")
def expand(ctx: NodeContext) -> torch.Tensor:
    x, sizes = ctx.tensor(0), ctx.sizes(1)
    if all(isinstance(size, int) for size in (*sizes, *ctx.dims())):
        own = [1] * (len(sizes) - ctx.rank()) + list(ctx.dims())
        wide = [1] * (ctx.rank() - len(sizes)) + list(sizes)
        both: list[Any] = [a if b == 1 else b for a, b in zip([1] * (len(wide) - len(own)) + own, wide)]
        return x.expand(both)
    return ctx.call(_expand, x, sizes)  # type: ignore[no-any-return]


def _expand(x: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """A 1 among the sizes leaves the input's own."""
    return x.expand(torch.broadcast_shapes(x.shape, tuple(sizes)))  # type: ignore[no-untyped-call]


@lowering("Concat")
def concat(ctx: NodeContext) -> torch.Tensor:
    return torch.cat(ctx.tensors(), ctx.integer("axis", 0))


@lowering("Split")
def split(ctx: NodeContext) -> tuple[torch.Tensor, ...]:
    x, axis, count = ctx.tensor(0), ctx.axis("axis", 0), len(ctx.node.outputs)
    if ctx.has(1):
        sizes = ctx.sizes(1)
    else:
        whole = ctx.size(0, axis)
        part = (whole + count - 1) // count  # the last one may be smaller
        sizes = [*[part] * (count - 1), whole - part * (count - 1)]
    parts, start = [], 0
    for size in sizes:
        parts.append(x.narrow(axis, start, size))
        start = start + size
    return tuple(parts)


@lowering("Shape")
def shape(ctx: NodeContext) -> torch.Tensor:
    raise TrainingError(f"Shape {ctx.node.name!r} has an input of unknown rank")


@lowering("Tile")
def tile(ctx: NodeContext) -> torch.Tensor:
    return ctx.tensor(0).repeat(ctx.sizes(1))


@lowering("ConstantOfShape")
def constant_of_shape(ctx: NodeContext) -> torch.Tensor:
    attribute = ctx.node.attributes.get("value")
    number = 0.0 if attribute is None else attribute.as_tensor().numpy().reshape(-1)[0].item()
    return ctx.call(_full, ctx.sizes(0), number, torch_dtype(ctx.output_type()), ctx.device)  # type: ignore[no-any-return]


def _full(sizes: list[int], number: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.full(sizes, number, dtype=dtype, device=device)


@lowering("Range")
def arange(ctx: NodeContext) -> torch.Tensor:
    start, end, step = (ctx.sizes(index)[0] for index in range(3))
    return ctx.call(_arange, start, end, step, torch_dtype(ctx.output_type()), ctx.device)  # type: ignore[no-any-return]


def _arange(start: float, end: float, step: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    # PyTorch refuses an end before the start, where ONNX has an empty tensor.
    empty = (end - start) * step <= 0
    return torch.arange(start, start if empty else end, step, dtype=dtype, device=device)


@lowering("Trilu")
def trilu(ctx: NodeContext) -> torch.Tensor:
    diagonal = ctx.sizes(1)[0] if ctx.has(1) else 0
    keep = torch.triu if ctx.integer("upper", 1) else torch.tril
    return keep(ctx.tensor(0), diagonal)
