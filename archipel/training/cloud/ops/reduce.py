"""Reductions over axes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from archipel.training.cloud.ops.context import NodeContext
from archipel.training.cloud.ops.table import lowering
from archipel.training.cloud.ops.types import torch_dtype, wrap

Axes = list[int]


def _sum(x: torch.Tensor, axes: Axes, keep: bool) -> torch.Tensor:
    return torch.sum(x, axes, keep, dtype=x.dtype)  # PyTorch would give the sum of int32 in int64


def _product(x: torch.Tensor, axes: Axes, keep: bool) -> torch.Tensor:
    for axis in sorted(axes, reverse=True):
        x = torch.prod(x, axis, keep, dtype=x.dtype)
    return x


def _l1(x: torch.Tensor, axes: Axes, keep: bool) -> torch.Tensor:
    return _sum(torch.abs(x), axes, keep)


def _sum_square(x: torch.Tensor, axes: Axes, keep: bool) -> torch.Tensor:
    return _sum(x * x, axes, keep)


def _l2(x: torch.Tensor, axes: Axes, keep: bool) -> torch.Tensor:
    # Its gradient at the zero vector is zero; that of a square root would be NaN.
    return torch.linalg.vector_norm(x, 2, axes, keep)  # type: ignore[no-any-return]


def _log_sum(x: torch.Tensor, axes: Axes, keep: bool) -> torch.Tensor:
    return torch.log(torch.sum(x, axes, keep))


_FLOATING: dict[str, Callable[..., torch.Tensor]] = {
    "ReduceL2": _l2,
    "ReduceLogSum": _log_sum,
    "ReduceLogSumExp": torch.logsumexp,
    "ReduceMean": torch.mean,
}
_EXTREMA = ("ReduceMax", "ReduceMin")
_FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    **_FLOATING,
    "ReduceL1": _l1,
    "ReduceMax": torch.amax,  # elements that share the extremum share its gradient, as in archipel's own rule
    "ReduceMin": torch.amin,
    "ReduceProd": _product,
    "ReduceSum": _sum,
    "ReduceSumSquare": _sum_square,
}


@lowering(*_FUNCTIONS)
def reduction(ctx: NodeContext) -> torch.Tensor:
    op_type, rank, keep = ctx.node.op_type, ctx.rank(), bool(ctx.integer("keepdims", 1))
    x = ctx.tensor(0)
    whole_numbers = not ctx.onnx_dtype().is_floating_point()
    if op_type in _FLOATING and whole_numbers:
        x = x.to(torch.float64)
    over_all = not ctx.integer("noop_with_empty_axes", 0)
    if ctx.has(1) and ctx.constant(1) is None:
        y = ctx.call(_reduce_at_runtime, op_type, x, ctx.tensor(1), keep, over_all)
    else:
        axes = [axis + rank if axis < 0 else axis for axis in ctx.fixed(1)] if ctx.has(1) else []
        axes = axes or (list(range(rank)) if over_all else [])
        if op_type in _EXTREMA and any(ctx.dims()[axis] == 0 for axis in axes):
            return ctx.call(_of_nothing, x, axes, keep, op_type == "ReduceMax")  # type: ignore[no-any-return]
        y = _reduce(op_type, x, axes, keep)
    if op_type in _FLOATING and whole_numbers:
        y = y.to(torch_dtype(ctx.output_type()))
    return wrap(y, ctx.output_type())


def _of_nothing(x: torch.Tensor, axes: Axes, keep: bool, largest: bool) -> torch.Tensor:
    """The extremum over an axis without elements: what every element would exceed."""
    kept = [1 if axis in axes else size for axis, size in enumerate(x.shape) if keep or axis not in axes]
    if x.dtype is torch.bool:
        return x.new_full(kept, not largest)
    if x.is_floating_point():
        return x.new_full(kept, -math.inf if largest else math.inf)
    bounds = torch.iinfo(x.dtype)
    return x.new_full(kept, bounds.min if largest else bounds.max)


def _reduce(op_type: str, x: torch.Tensor, axes: Axes, keep: bool) -> torch.Tensor:
    # PyTorch takes no axes for all of them: without any, over an axis of size 1 put in front.
    return _FUNCTIONS[op_type](x, axes, keep) if axes else _FUNCTIONS[op_type](x.unsqueeze(0), [0], False)


def _reduce_at_runtime(op_type: str, x: torch.Tensor, axes: torch.Tensor, keep: bool, over_all: bool) -> torch.Tensor:
    chosen: Any = [axis + x.ndim if axis < 0 else axis for axis in axes.tolist()]
    chosen = chosen or (list(range(x.ndim)) if over_all else [])
    if op_type in _EXTREMA and any(x.size(axis) == 0 for axis in chosen):
        return _of_nothing(x, chosen, keep, op_type == "ReduceMax")
    return _reduce(op_type, x, chosen, keep)
