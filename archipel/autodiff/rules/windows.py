"""Sliding windows: their geometry, unfolding an input into its windows, and the adjoint."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from archipel.autodiff.context import RuleContext
from archipel.graph.build import Builder
from archipel.graph.shapes import Dim, dims, dtype_of, is_static

_LAST = int(np.iinfo(np.int64).min)


@dataclass(frozen=True)
class Window:
    """Per spatial axis: size, stride, dilation, and padding before and after."""

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]

    @property
    def extent(self) -> tuple[int, ...]:
        """Elements from the first to the last that a window covers."""
        return tuple(d * (k - 1) + 1 for k, d in zip(self.kernel, self.dilations))

    @property
    def size(self) -> int:
        return math.prod(self.kernel)

    @property
    def pads(self) -> list[int]:
        return [*self.before, *self.after]

    @property
    def attributes(self) -> dict[str, list[int]]:
        """As Conv takes them."""
        return {
            "kernel_shape": list(self.kernel),
            "strides": list(self.strides),
            "dilations": list(self.dilations),
            "pads": self.pads,
        }

    @classmethod
    def of(cls, ctx: RuleContext, kernel: Sequence[Dim]) -> Window:
        """The window of a Conv or pooling node. Refuses what its shapes leave open."""
        n = len(kernel)
        if not all(isinstance(k, int) for k in kernel):
            ctx.refuse("kernel_shape", f"must be fixed, is {list(kernel)}")
        sizes = tuple(k for k in kernel if isinstance(k, int))
        strides = tuple(ctx.attribute("strides", [1] * n))
        dilations = tuple(ctx.attribute("dilations", [1] * n))
        pads = ctx.attribute("pads", [0] * (2 * n))
        mode = ctx.attribute("auto_pad", "NOTSET")
        if mode in ("VALID", "SAME_UPPER", "SAME_LOWER"):
            pads = [0] * (2 * n)
        window = cls(sizes, strides, dilations, tuple(pads[:n]), tuple(pads[n:]))
        if mode not in ("SAME_UPPER", "SAME_LOWER"):
            return window
        totals = []
        for size, extent, stride in zip(dims(ctx.input(0))[2:], window.extent, strides):
            if stride == 1:
                totals.append(extent - 1)
            elif isinstance(size, int):
                totals.append(max((math.ceil(size / stride) - 1) * stride + extent - size, 0))
            else:
                ctx.refuse(f"auto_pad={mode}", f"with stride {stride} the spatial size must be fixed, is {size!r}")
        small = tuple(total // 2 for total in totals)
        large = tuple(total - total // 2 for total in totals)
        before, after = (small, large) if mode == "SAME_UPPER" else (large, small)
        return cls(sizes, strides, dilations, before, after)


def unfold(op: Builder, x: ir.Value, window: Window, channels: int) -> ir.Value:
    """Windows of `x` [batch, channels, *spatial] as [batch, channels * window.size, *output].

    A Conv whose kernel is the identity, one group per channel: four times faster than slicing on ONNX Runtime.
    """
    result: ir.Value = op.Conv(x, _identity(op, x, window, channels), group=channels, **window.attributes)
    return result


def fold(op: Builder, windows: ir.Value, x: ir.Value, window: Window, channels: int) -> ir.Value:
    """The adjoint of `unfold`: add the elements of all windows where they came from."""
    return transposed(op, windows, _identity(op, x, window, channels), x, window, channels)


def transposed(op: Builder, g: ir.Value, weight: ir.Value, x: ir.Value, window: Window, group: int) -> ir.Value:
    """The adjoint of Conv in its input `x`, by ConvTranspose; g [batch, filters, *output] -> the shape of x."""
    spatial = dims(x)[2:]
    attributes = dict(window.attributes)
    if is_static(spatial):
        attributes["output_padding"] = [
            (size + before + after - extent) % stride
            for size, before, after, extent, stride in zip(
                (d for d in spatial if isinstance(d, int)),
                window.before,
                window.after,
                window.extent,
                window.strides,
            )
        ]
        result: ir.Value = op.ConvTranspose(g, weight, group=group, **attributes)
    else:
        # How much of the end no window reached shows at run time only: make it long enough, then cut.
        n = len(spatial)
        attributes["output_padding"] = [stride - 1 for stride in window.strides]
        attributes["pads"] = [*window.before, *[0] * n]
        long = op.ConvTranspose(g, weight, group=group, **attributes)
        result = op.Slice(long, [0] * n, op.Shape(x, start=2), list(range(2, n + 2)))
    result.shape = x.shape
    return result


def flip(op: Builder, weight: ir.Value) -> ir.Value:
    """Reverse the spatial axes of [filters, channels, *kernel]."""
    shape = dims(weight)
    axes = [axis for axis in range(2, len(shape)) if shape[axis] != 1]
    if not axes:
        return weight
    n = len(axes)
    result: ir.Value = op.Slice(weight, [-1] * n, [_LAST] * n, axes, [-1] * n)
    result.shape = weight.shape
    return result


def _identity(op: Builder, x: ir.Value, window: Window, channels: int) -> ir.Value:
    eye = np.eye(window.size, dtype=dtype_of(x).numpy()).reshape(window.size, 1, *window.kernel)
    one = op.constant(eye)
    # Repeated in the graph and not in the file: the runtime folds it when it loads the graph.
    result: ir.Value = one if channels == 1 else op.Tile(one, [channels] + [1] * (eye.ndim - 1))
    return result
