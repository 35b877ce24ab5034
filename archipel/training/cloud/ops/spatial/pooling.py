"""Pooling: the maximum, the mean or a norm of each window."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from archipel.errors import TrainingError
from archipel.graph.shapes import is_static
from archipel.training.cloud.ops.context import NodeContext
from archipel.training.cloud.ops.spatial.padding import pad_constant, same_padding
from archipel.training.cloud.ops.table import lowering
from archipel.training.cloud.ops.types import torch_dtype

_MAXIMUM: tuple[Callable[..., Any], ...] = (functional.max_pool1d, functional.max_pool2d, functional.max_pool3d)
_MEAN: tuple[Callable[..., Any], ...] = (functional.avg_pool1d, functional.avg_pool2d, functional.avg_pool3d)
_CONV: tuple[Callable[..., Any], ...] = (functional.conv1d, functional.conv2d, functional.conv3d)

_MOST_TAPS = 8
"""Elements of a window along an axis, each of which is a pass over the output."""


class _Windows:
    """The windows of a pooling node: `kernel`, `strides`, `dilations`, and what is padded before and after each axis.

    Paddings are numbers, or Proxies of them where `auto_pad` pads an axis of symbolic size.
    """

    def __init__(self, ctx: NodeContext) -> None:
        self.kernel = ctx.integers("kernel_shape", [])
        self.count = len(self.kernel)
        if self.count not in (1, 2, 3) or ctx.rank() != self.count + 2:
            raise TrainingError(
                f"{ctx.node.op_type} {ctx.node.name!r} has windows of {self.count} axes in an input of rank "
                f"{ctx.rank()}; PyTorch pools over 1 to 3 axes behind batch and channels"
            )
        self.strides = ctx.integers("strides", [1] * self.count)
        self.dilations = ctx.integers("dilations", [1] * self.count)
        self.before, self.after = same_padding(ctx, self.kernel, self.strides, self.dilations)
        self.round_up = bool(ctx.integer("ceil_mode", 0))
        self.reach = [d * (k - 1) + 1 for k, d in zip(self.kernel, self.dilations)]

    @property
    def plain(self) -> bool:
        """Whether PyTorch's own padding is the same: alike at both ends, and at most half a window."""
        known = all(isinstance(number, int) for number in (*self.before, *self.after))
        return known and self.before == self.after and all(2 * p <= k for p, k in zip(self.before, self.kernel))

    def cut(self, ctx: NodeContext, y: torch.Tensor) -> torch.Tensor:
        """Without the windows that start behind the input, which ceil_mode would add where the padding is explicit."""
        if not self.round_up:
            return y
        starts = [-(-(ctx.size(0, 2 + i) + self.before[i]) // self.strides[i]) for i in range(self.count)]
        kept: Any = (..., *[slice(None, end) for end in starts])
        return y[kept]


@lowering("MaxPool")
def max_pool(ctx: NodeContext) -> torch.Tensor | tuple[torch.Tensor, ...]:
    # Of equal maxima PyTorch gives the first one the whole gradient, where archipel's own rule shares it among them.
    windows, x = _Windows(ctx), ctx.tensor(0)
    whole_numbers = not ctx.onnx_dtype().is_floating_point()
    if whole_numbers:
        x = x.to(torch.float32)
    padding: list[int] = windows.before
    explicit = not windows.plain
    if explicit:
        x, padding = pad_constant(x, windows.before, windows.after, -float("inf")), [0] * windows.count
    indexed = len(ctx.node.outputs) > 1 and bool(ctx.node.outputs[1].name)
    if not indexed and not windows.round_up and not explicit:
        y = ctx.call(_maximum, x, windows.kernel, windows.strides, padding, windows.dilations)
        return y.to(torch_dtype(ctx.output_type())) if whole_numbers else y  # type: ignore[no-any-return]
    found = _MAXIMUM[windows.count - 1](
        x, windows.kernel, windows.strides, padding, windows.dilations, windows.round_up, indexed
    )
    y, indices = (found[0], found[1]) if indexed else (found, None)
    y = windows.cut(ctx, y) if explicit else y
    y = y.to(torch_dtype(ctx.output_type())) if whole_numbers else y
    if indices is None:
        return y
    indices = windows.cut(ctx, indices) if explicit else indices
    return y, _onnx_indices(ctx, windows, indices, explicit)


def _maximum(
    x: torch.Tensor, kernel: list[int], strides: list[int], padding: list[int], dilations: list[int]
) -> torch.Tensor:
    """The maximum of each window.

    Without gradients on a CPU axis by axis, of strided views, which gives the same numbers: for windows of 2 x 2 in
    pictures of 28 x 28 in a tenth of the time of PyTorch's own function, which looks for indices as well.
    """
    if torch.is_grad_enabled() or max(kernel) > _MOST_TAPS or x.device.type != "cpu" or not x.is_contiguous():
        return _MAXIMUM[len(kernel) - 1](x, kernel, strides, padding, dilations)  # type: ignore[no-any-return]
    x = pad_constant(x, padding, padding, -float("inf"))
    for axis, (k, stride, step) in enumerate(zip(kernel, strides, dilations), start=x.ndim - len(kernel)):
        count = (x.size(axis) - step * (k - 1) - 1) // stride + 1
        before = (slice(None),) * axis
        taps = [x[(*before, slice(t * step, t * step + stride * (count - 1) + 1, stride))] for t in range(k)]
        x = functools.reduce(torch.maximum, taps)
    return x


def _onnx_indices(ctx: NodeContext, windows: _Windows, indices: Any, explicit: bool) -> torch.Tensor:
    """ONNX's positions in the whole tensor, of PyTorch's in each channel's (padded) plane."""
    sizes = [ctx.size(0, 2 + i) for i in range(windows.count)]
    padded = [s + b + a for s, b, a in zip(sizes, windows.before, windows.after)] if explicit else sizes
    at: list[Any] = []
    for i in reversed(range(windows.count)):
        at.insert(0, indices % padded[i] - (windows.before[i] if explicit else 0))
        indices = indices // padded[i]
    order = range(windows.count)
    position: Any = 0
    for i in reversed(order) if ctx.integer("storage_order", 0) else order:
        position = position * sizes[i] + at[i]
    return ctx.call(_add_planes, position, sizes)  # type: ignore[no-any-return]


def _add_planes(position: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    plane = math.prod(sizes)
    planes = torch.arange(position.size(0) * position.size(1), device=position.device)
    return position + (planes * plane).reshape(position.size(0), position.size(1), *[1] * len(sizes))


@lowering("AveragePool")
def average_pool(ctx: NodeContext) -> torch.Tensor:
    windows, x = _Windows(ctx), ctx.tensor(0)
    include = bool(ctx.integer("count_include_pad", 0))
    if windows.plain and set(windows.dilations) == {1}:
        mean = _MEAN[windows.count - 1]
        return mean(x, windows.kernel, windows.strides, windows.before, windows.round_up, include)  # type: ignore[no-any-return]
    total = _sum_windows(ctx, windows, x)
    if is_static(ctx.dims()[2:]) and all(isinstance(number, int) for number in (*windows.before, *windows.after)):
        return total / ctx.new_constant(_counts(ctx, windows, include)).to(ctx.dtype())
    ones = torch.ones_like(x[:1, :1]).detach()
    if include:
        counted = pad_constant(ones, windows.before, windows.after, 1.0)
        return total / _sum_windows(ctx, windows, counted, padded=True).clamp(min=1)
    return total / _sum_windows(ctx, windows, ones).clamp(min=1)


def _sum_windows(ctx: NodeContext, windows: _Windows, x: torch.Tensor, padded: bool = False) -> torch.Tensor:
    """The sum of each window of `x`, which may have its padding already."""
    extra = [stride - 1 if windows.round_up else 0 for stride in windows.strides]
    before: Sequence[Any] = [0] * windows.count if padded else windows.before
    after = extra if padded else [a + e for a, e in zip(windows.after, extra)]
    x = pad_constant(x, before, after, 0.0)
    if set(windows.dilations) == {1}:
        mean = _MEAN[windows.count - 1](x, windows.kernel, windows.strides)
        return windows.cut(ctx, mean * int(np.prod(windows.kernel)))
    planes = x.flatten(0, 1).unsqueeze(1)
    ones = ctx.new_constant(np.ones((1, 1, *windows.kernel), np.float32)).to(ctx.dtype())
    sums = _CONV[windows.count - 1](planes, ones, None, windows.strides, 0, windows.dilations)
    return windows.cut(ctx, sums.squeeze(1).unflatten(0, [x.size(0), x.size(1)]))


def _counts(ctx: NodeContext, windows: _Windows, include: bool) -> np.ndarray:
    """How many elements each window counts, [*output]: the product of what it counts on each axis."""
    counts = np.ones(())
    for i in range(windows.count):
        size, before, after, stride = ctx.size(0, 2 + i), windows.before[i], windows.after[i], windows.strides[i]
        whole = size + before + after
        number = (whole - windows.reach[i] + (stride - 1 if windows.round_up else 0)) // stride + 1
        if windows.round_up:
            number = min(number, -(-(size + before) // stride))
        taken = np.arange(number)[:, None] * stride + np.arange(windows.kernel[i]) * windows.dilations[i]
        first, last = (0, whole) if include else (before, before + size)
        counts = np.multiply.outer(counts, ((taken >= first) & (taken < last)).sum(1))
    return np.maximum(counts, 1)


@lowering("LpPool")
def lp_pool(ctx: NodeContext) -> torch.Tensor:
    p = ctx.integer("p", 2)
    return torch.pow(_sum_windows(ctx, _Windows(ctx), ctx.tensor(0).abs() ** p), 1 / p)


@lowering("GlobalAveragePool")
def global_average_pool(ctx: NodeContext) -> torch.Tensor:
    return ctx.tensor(0).mean(list(range(2, ctx.rank())), keepdim=True)


@lowering("GlobalMaxPool")
def global_max_pool(ctx: NodeContext) -> torch.Tensor:
    return ctx.tensor(0).amax(list(range(2, ctx.rank())), keepdim=True)


@lowering("GlobalLpPool")
def global_lp_pool(ctx: NodeContext) -> torch.Tensor:
    axes = list(range(2, ctx.rank()))
    return torch.linalg.vector_norm(ctx.tensor(0), ctx.integer("p", 2), axes, keepdim=True)  # type: ignore[no-any-return]


@lowering("MaxUnpool")
def max_unpool(ctx: NodeContext) -> torch.Tensor:
    kernel = ctx.integers("kernel_shape", [])
    strides, pads = ctx.integers("strides", [1] * len(kernel)), ctx.integers("pads", [0] * 2 * len(kernel))
    if ctx.has(2):
        sizes = ctx.sizes(2)
    else:
        around = [before + after for before, after in zip(pads, pads[len(kernel) :])]
        inner = [(ctx.size(0, 2 + i) - 1) * strides[i] + kernel[i] - around[i] for i in range(len(kernel))]
        sizes = [ctx.size(0, 0), ctx.size(0, 1), *inner]
    return ctx.call(_put, ctx.tensor(0), ctx.tensor(1), sizes)  # type: ignore[no-any-return]


def _put(x: torch.Tensor, indices: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    flat = x.new_zeros(math.prod(sizes))
    return flat.scatter(0, indices.reshape(-1), x.reshape(-1)).reshape(sizes)
