"""Convolutions."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from archipel.errors import TrainingError
from archipel.training.cloud.ops.context import NodeContext
from archipel.training.cloud.ops.spatial.padding import pad_constant, same_padding
from archipel.training.cloud.ops.table import lowering


@lowering("Conv")
def conv(ctx: NodeContext) -> torch.Tensor:
    # Exporters write a bias of zeros where there is none; a GPU would add it in a pass of its own.
    zeros = (constant := ctx.constant(2)) is not None and not constant.any()
    return convolve(ctx, ctx.tensor(0), ctx.tensor(1), ctx.tensor(2) if ctx.has(2) and not zeros else None)


def convolve(
    ctx: NodeContext, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, weights: int = 1
) -> torch.Tensor:
    """A convolution with the attributes of the node; `weights`: which input of it says how large the kernel is."""
    spatial = ctx.rank() - 2
    if spatial not in (1, 2, 3):
        raise TrainingError(
            f"{ctx.node.op_type} {ctx.node.name!r} has {spatial} spatial axes; PyTorch has convolutions of 1 to 3"
        )
    strides, dilations = ctx.integers("strides", [1] * spatial), ctx.integers("dilations", [1] * spatial)
    kernel = kernel_shape(ctx, spatial, weights)
    begins, ends = same_padding(ctx, kernel, strides, dilations)
    if all(isinstance(number, int) for number in (*begins, *ends)) and begins == ends:
        padding = begins
    else:
        # PyTorch pads both ends alike.
        x, padding = pad_constant(x, begins, ends, 0.0), [0] * spatial
    function = (functional.conv1d, functional.conv2d, functional.conv3d)[spatial - 1]
    return function(x, w, bias, strides, padding, dilations, ctx.integer("group", 1))


@lowering("ConvTranspose")
def conv_transpose(ctx: NodeContext) -> torch.Tensor:
    x, w = ctx.tensor(0), ctx.tensor(1)
    bias = ctx.tensor(2) if ctx.has(2) else None
    spatial = ctx.rank() - 2
    if spatial not in (1, 2, 3):
        raise TrainingError(f"ConvTranspose {ctx.node.name!r} has {spatial} spatial axes; PyTorch has those of 1 to 3")
    strides, dilations = ctx.integers("strides", [1] * spatial), ctx.integers("dilations", [1] * spatial)
    extra = ctx.integers("output_padding", [0] * spatial)
    kernel = kernel_shape(ctx, spatial)
    pads = ctx.integers("pads", [0] * 2 * spatial)
    begins, ends = pads[:spatial], pads[spatial:]
    reach = [d * (k - 1) + 1 for k, d in zip(kernel, dilations)]
    mode = ctx.text("auto_pad", "NOTSET")
    if ctx.has_attribute("output_shape") or mode in ("SAME_UPPER", "SAME_LOWER"):
        sizes = [ctx.size(0, 2 + i) for i in range(spatial)]
        wanted = ctx.integers("output_shape", [])[-spatial:] or [s * n for s, n in zip(strides, sizes)]
        whole = [s * (n - 1) + e + r for s, n, e, r in zip(strides, sizes, extra, reach)]
        totals = [_positive(ctx, w - o) for w, o in zip(whole, wanted)]
        upper = mode == "SAME_UPPER"
        begins = [t // 2 if upper else t - t // 2 for t in totals]
        # A negative end adds zeros, where the output is to be larger than what the input reaches.
        ends = [w - o - b for w, o, b in zip(whole, wanted, begins)]
    function = (functional.conv_transpose1d, functional.conv_transpose2d, functional.conv_transpose3d)[spatial - 1]
    group = ctx.integer("group", 1)
    known = all(isinstance(number, int) for number in (*begins, *ends))
    if (
        known
        and begins == ends
        and min(begins) >= 0
        and all(e < max(s, d) for e, s, d in zip(extra, strides, dilations))
    ):
        return function(x, w, bias, strides, begins, extra, group, dilations)
    # Everything first, with what output_padding adds at the end; then what the pads take off at both ends.
    y = function(x, w, None, strides, [0] * spatial, [0] * spatial, group, dilations)
    y = pad_constant(y, [-b for b in begins], [e - end for e, end in zip(extra, ends)], 0.0)
    return y if bias is None else y + bias.reshape([-1, *[1] * spatial])


def _positive(ctx: NodeContext, number: Any) -> Any:
    return max(number, 0) if isinstance(number, int) else ctx.call(max, number, 0)


def kernel_shape(ctx: NodeContext, spatial: int, weights: int = 1) -> list[int]:
    """The kernel's size, of the attribute or of the weights."""
    known = ctx.integers("kernel_shape", [])
    if known:
        return known
    sizes = ctx.dims(weights)[2:]
    if not all(isinstance(size, int) for size in sizes):
        raise TrainingError(f"{ctx.node.op_type} {ctx.node.name!r}: the kernel's size is not known")
    return [int(size) for size in sizes]  # type: ignore[arg-type]
