"""Padding at the ends of spatial axes, as convolutions and pools ask for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

from archipel.training.cloud.ops.context import NodeContext


def same_padding(
    ctx: NodeContext, kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int]
) -> tuple[list[Any], list[Any]]:
    """What `pads` or `auto_pad` adds before and after each spatial axis of input 0, with `kernel` in its taps."""
    spatial = len(kernel)
    mode = ctx.text("auto_pad", "NOTSET")
    if mode == "VALID":
        return [0] * spatial, [0] * spatial
    if mode == "NOTSET":
        pads = ctx.integers("pads", [0] * 2 * spatial)
        return pads[:spatial], pads[spatial:]
    begins, ends = [], []
    for i in range(spatial):
        size, reach = ctx.size(0, 2 + i), dilations[i] * (kernel[i] - 1) + 1
        total = (
            _missing(size, strides[i], reach) if isinstance(size, int) else ctx.call(_missing, size, strides[i], reach)
        )
        begins.append(total // 2 if mode == "SAME_UPPER" else total - total // 2)
        ends.append(total - begins[-1])
    return begins, ends


def _missing(size: int, stride: int, reach: int) -> int:
    outputs = -(-size // stride)
    return max((outputs - 1) * stride + reach - size, 0)


def pad_constant(x: torch.Tensor, begins: Sequence[Any], ends: Sequence[Any], value: float) -> torch.Tensor:
    """`x` with constants before and after its last axes; negative numbers cut off."""
    if not any(_nonzero(number) for number in (*begins, *ends)):
        return x
    pairs = [number for begin, end in zip(reversed(begins), reversed(ends)) for number in (begin, end)]
    return functional.pad(x, pairs, value=value)


def _nonzero(number: Any) -> bool:
    return not isinstance(number, int) or number != 0
