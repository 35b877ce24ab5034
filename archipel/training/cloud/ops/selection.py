"""The largest elements, chosen elements, and running sums."""

from __future__ import annotations

import torch

from archipel.training.cloud.ops.context import NodeContext
from archipel.training.cloud.ops.table import lowering
from archipel.training.cloud.ops.types import wrap


@lowering("TopK")
def top_k(ctx: NodeContext) -> tuple[torch.Tensor, torch.Tensor]:
    axis = ctx.axis("axis", -1)
    # Of equal elements the first one counts, which PyTorch's topk does not promise.
    values, indices = torch.sort(ctx.tensor(0), dim=axis, descending=bool(ctx.integer("largest", 1)), stable=True)
    count = ctx.sizes(1)[0]
    return values.narrow(axis, 0, count), indices.narrow(axis, 0, count)


@lowering("ArgMax", "ArgMin")
def arg_extreme(ctx: NodeContext) -> torch.Tensor:
    axis, keep = ctx.axis("axis", 0), bool(ctx.integer("keepdims", 1))
    find = torch.argmax if ctx.node.op_type == "ArgMax" else torch.argmin
    if not ctx.integer("select_last_index", 0):
        return find(ctx.tensor(0), axis, keep)
    # Of equal elements the last: the first one from behind.
    return ctx.size(0, axis) - 1 - find(ctx.tensor(0).flip(axis), axis, keep)  # type: ignore[no-any-return]


@lowering("Hardmax")
def hardmax(ctx: NodeContext) -> torch.Tensor:
    x, axis = ctx.tensor(0), ctx.axis("axis", -1)
    return torch.zeros_like(x).scatter(axis, x.argmax(axis, True), 1.0)


@lowering("OneHot")
def one_hot(ctx: NodeContext) -> torch.Tensor:
    axis = ctx.integer("axis", -1)
    depth = ctx.sizes(1)[0]
    return ctx.call(  # type: ignore[no-any-return]
        _one_hot, ctx.tensor(0), depth, ctx.tensor(2), axis + ctx.rank() + 1 if axis < 0 else axis
    )


def _one_hot(indices: torch.Tensor, depth: float, values: torch.Tensor, axis: int) -> torch.Tensor:
    count, rank = int(depth), indices.ndim + 1
    place = torch.arange(count, device=indices.device).reshape([-1 if i == axis else 1 for i in range(rank)])
    index = indices.to(torch.int64).unsqueeze(axis)
    # Indices below -depth or from depth on meet no place.
    return torch.where((index == place) | (index + count == place), values[1], values[0])


@lowering("Compress")
def compress(ctx: NodeContext) -> torch.Tensor:
    axis = ctx.axis("axis", 0) if ctx.has_attribute("axis") else None
    return ctx.call(_compress, ctx.tensor(0), ctx.tensor(1), axis)  # type: ignore[no-any-return]


def _compress(x: torch.Tensor, condition: torch.Tensor, axis: int | None) -> torch.Tensor:
    kept = condition.nonzero().reshape(-1)
    return x.reshape(-1).index_select(0, kept) if axis is None else x.index_select(axis, kept)


@lowering("NonZero")
def nonzero(ctx: NodeContext) -> torch.Tensor:
    x = ctx.tensor(0)
    return (x if ctx.rank() else x.reshape(1)).nonzero().t()


@lowering("Unique")
def unique(ctx: NodeContext) -> tuple[torch.Tensor, ...]:
    axis = ctx.axis("axis", 0) if ctx.has_attribute("axis") else None
    found = ctx.call(_unique, ctx.tensor(0), axis, bool(ctx.integer("sorted", 1)))
    return tuple(found[i] for i in range(len(ctx.node.outputs)))


def _unique(x: torch.Tensor, axis: int | None, ordered: bool) -> tuple[torch.Tensor, ...]:
    """Unique elements or slices, where each comes first, which of them each is, and how often each comes."""
    values, inverse, counts = torch.unique(x, return_inverse=True, return_counts=True, dim=axis)
    inverse = inverse.reshape(-1)
    place = torch.arange(inverse.numel(), device=x.device)
    first = place.new_full(counts.shape, inverse.numel()).scatter_reduce(0, inverse, place, "amin")
    if not ordered:
        order = first.argsort()
        values, first, counts = values.index_select(axis or 0, order), first[order], counts[order]
        inverse = order.argsort()[inverse]
    return values, first, inverse, counts


@lowering("CumSum")
def cumulative_sum(ctx: NodeContext) -> torch.Tensor:
    exclusive, reverse = bool(ctx.integer("exclusive", 0)), bool(ctx.integer("reverse", 0))
    return wrap(ctx.call(_cumulative_sum, ctx.tensor(0), ctx.sizes(1)[0], exclusive, reverse), ctx.output_type())


def _cumulative_sum(x: torch.Tensor, axis: int, exclusive: bool, reverse: bool) -> torch.Tensor:
    items = x.flip(axis) if reverse else x
    if exclusive and items.size(axis):
        # Without the last one, behind a zero: subtracting each item again would round.
        items = torch.cat(
            [torch.zeros_like(items.narrow(axis, 0, 1)), items.narrow(axis, 0, items.size(axis) - 1)], axis
        )
    total = torch.cumsum(items, axis, dtype=x.dtype)
    return total.flip(axis) if reverse else total
