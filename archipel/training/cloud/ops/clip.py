"""Clip, with a gradient on the bounds, but for ReLU6."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from archipel.training.cloud.ops.context import NodeContext
from archipel.training.cloud.ops.table import lowering


@lowering("Clip")
def clip(ctx: NodeContext) -> torch.Tensor:
    x: torch.Tensor = ctx.tensor(0)
    if not ctx.has(1) and not ctx.has(2):
        return x
    bounds: list[Any] = [ctx.operand(index) if ctx.has(index) else None for index in (1, 2)]
    if any(isinstance(bound, torch.Tensor | torch.fx.Proxy) for bound in bounds):
        # The minimum last: where the bounds cross, ONNX answers with the upper one.
        x = torch.maximum(x, ctx.tensor(1)) if ctx.has(1) else x
        return torch.minimum(x, ctx.tensor(2)) if ctx.has(2) else x
    low, high = bounds
    if not ctx.onnx_dtype().is_floating_point():
        return torch.clamp(x, low, high)
    if (low, high) == (0.0, 6.0):
        # Made of a ReLU6, as far as one can tell: it stays what it was, and exactly on a bound its gradient is 0.
        return functional.relu6(x)
    low, high = (-math.inf if low is None else low), (math.inf if high is None else high)
    return ctx.call(clamp, x, low, high)  # type: ignore[no-any-return]


def clamp(x: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """torch.clamp with the gradient of `_Clip`."""
    return _Clip.apply(x, low, high)  # type: ignore[no-any-return, no-untyped-call]


class _Clip(torch.autograd.Function):
    """clamp, whose gradient takes one pass over memory where PyTorch's takes four.

    PyTorch's backward of hardtanh lets through what lies strictly between its bounds. With bounds a little further
    apart that is what lies on them, too, as the gradient of Clip on devices has it.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor, low: float, high: float) -> torch.Tensor:
        return torch.clamp(x, low, high)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        x, low, high = inputs
        ctx.save_for_backward(x)
        ctx.bounds = _further(low, -math.inf, x.dtype), _further(high, math.inf, x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (x,) = ctx.saved_tensors
        return torch.ops.aten.hardtanh_backward(gradients[0], x, *ctx.bounds), None, None


def _further(bound: float, towards: float, dtype: torch.dtype) -> float:
    """The next number of the type, and beside zero the first one that no processor takes for zero."""
    if math.isinf(bound):
        return bound
    if dtype is torch.float64:
        found = math.nextafter(bound, towards)
    else:
        # A step of the type, or of float32 for those with fewer digits, whose next number lies further away.
        found = float(np.nextafter(np.float32(bound), np.float32(towards)))
    tiny = 1.2e-38
    return math.copysign(tiny, towards) if abs(found) < tiny else found
