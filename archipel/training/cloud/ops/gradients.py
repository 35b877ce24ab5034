"""Gradients that `recognize_gradients` found in a program: one call of PyTorch each."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch

from archipel.graph.shapes import fixed_sizes
from archipel.training.cloud.ops.context import NodeContext
from archipel.training.cloud.ops.spatial.padding import pad_constant, same_padding
from archipel.training.cloud.ops.table import lowering

DOMAIN = "archipel.gradients"
"""The domain of the nodes; none of them stands in a file."""


@lowering("ConvWeight", domain=DOMAIN)
def conv_weight(ctx: NodeContext) -> torch.Tensor:
    """x [batch, channels, *spatial], g [batch, filters, *output] -> [filters, channels / group, *kernel]."""
    x, g = ctx.tensor(0), ctx.tensor(1)
    shape = fixed_sizes(ctx.output_dims())
    spatial = len(shape) - 2
    strides, dilations = ctx.integers("strides", [1] * spatial), ctx.integers("dilations", [1] * spatial)
    before, after = same_padding(ctx, shape[2:], strides, dilations)
    if before != after or not all(isinstance(number, int) for number in before):
        x, before = pad_constant(x, before, after, 0.0), [0] * spatial
    group = ctx.integer("group", 1)
    return ctx.call(_conv_weight, x, g, shape, strides, before, dilations, group)  # type: ignore[no-any-return]


def _conv_weight(
    x: torch.Tensor,
    g: torch.Tensor,
    shape: Sequence[int],
    strides: Sequence[int],
    padding: Sequence[int],
    dilations: Sequence[int],
    group: int,
) -> torch.Tensor:
    # Of the weight only the shape counts.
    weight = x.new_empty(()).expand(list(shape))
    none = [0] * len(strides)
    found: tuple[torch.Tensor, ...] = torch.ops.aten.convolution_backward(
        g, x, weight, None, strides, padding, dilations, False, none, group, [False, True, False]
    )
    return found[1]


@lowering("Relu", domain=DOMAIN)
def relu(ctx: NodeContext) -> torch.Tensor:
    """y, g -> g where y is above 0."""
    return ctx.call(torch.ops.aten.threshold_backward, ctx.tensor(1), ctx.tensor(0), 0)  # type: ignore[no-any-return]


@lowering("MaxPool", domain=DOMAIN)
def max_pool(ctx: NodeContext) -> torch.Tensor:
    """x, y, g: as the rule has it, elements that share a maximum get equal parts of g."""
    x, y, g = ctx.tensor(0), ctx.tensor(1), ctx.tensor(2)
    kernel = ctx.integers("kernel_shape", [])
    spatial = len(kernel)
    strides, dilations = ctx.integers("strides", [1] * spatial), ctx.integers("dilations", [1] * spatial)
    before, _ = same_padding(ctx, kernel, strides, dilations)
    return ctx.call(_share_among_maxima, x, y, g, kernel, strides, dilations, before)  # type: ignore[no-any-return]


def _share_among_maxima(
    x: torch.Tensor,
    y: torch.Tensor,
    g: torch.Tensor,
    kernel: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
    before: Sequence[int],
) -> torch.Tensor:
    """One strided view of x for each element of a window: a few passes over y, in place of one over all windows."""
    n = len(kernel)
    sizes, outputs = x.shape[-n:], y.shape[-n:]
    reach = [d * (k - 1) + 1 for k, d in zip(kernel, dilations)]
    # Elements that the windows read, from the padding on; more than there are only at the end.
    read = [s * (o - 1) + r for s, o, r in zip(strides, outputs, reach)]
    whole = [max(r, b + size) for r, b, size in zip(read, before, sizes)]
    padded = x
    if whole != list(sizes):
        ends = [w - b - size for w, b, size in zip(whole, before, sizes)]
        padded = pad_constant(x, before, ends, torch.finfo(x.dtype).min)
    views: list[tuple[Any, ...]] = [
        (..., *(slice(t * d, t * d + s * (o - 1) + 1, s) for t, d, s, o in zip(tap, dilations, strides, outputs)))
        for tap in itertools.product(*map(range, kernel))
    ]
    masks = [padded[view] == y for view in views]
    share = g / functools.reduce(torch.add, masks[1:], masks[0].to(torch.uint8))
    apart = all(s >= r for s, r in zip(strides, reach))
    covers = apart and math.prod(kernel) * math.prod(outputs) == math.prod(whole)
    total = torch.empty_like(padded) if covers else torch.zeros_like(padded)
    for view, mask in zip(views, masks):
        if apart:
            total[view] = share * mask
        else:
            total[view].add_(share * mask)
    inside: tuple[Any, ...] = (..., *(slice(b, b + size) for b, size in zip(before, sizes)))
    return total[inside]
