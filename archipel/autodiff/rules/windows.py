"""Sliding windows: their geometry, unfolding an input into its windows (im2col), and the adjoint (col2im)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from archipel.autodiff.context import RuleContext
from archipel.graph.build import Builder
from archipel.graph.shapes import Dim, dims, dtype_of, is_static

LAST = int(np.iinfo(np.int64).max)

Cut = Callable[[ir.Value], ir.Value]
"""Takes a gradient of a padded input back to the input's own shape."""


@dataclass(frozen=True)
class Window:
    """Per spatial axis: size of the kernel, stride, dilation, and padding before and after, all in elements."""

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]

    @property
    def extent(self) -> tuple[int, ...]:
        """Elements from the first that a window reads to the last, both included."""
        return tuple(d * (k - 1) + 1 for k, d in zip(self.kernel, self.dilations))

    @property
    def size(self) -> int:
        """Elements that one window reads of one channel."""
        return math.prod(self.kernel)

    @property
    def pads(self) -> list[int]:
        """In ONNX's order: before on every axis, then after."""
        return [*self.before, *self.after]

    @property
    def dense(self) -> bool:
        """Whether windows neither skip elements inside nor move by more than one."""
        return set(self.strides) == {1} and set(self.dilations) == {1}

    @property
    def attributes(self) -> dict[str, list[int]]:
        """As Conv takes them."""
        return {
            "kernel_shape": list(self.kernel),
            "strides": list(self.strides),
            "dilations": list(self.dilations),
            "pads": self.pads,
        }

    def padded(self, before: Sequence[int], after: Sequence[int]) -> Window:
        """The same window with this padding."""
        return replace(self, before=tuple(before), after=tuple(after))

    @property
    def bare(self) -> Window:
        """The same window without padding."""
        none = (0,) * len(self.kernel)
        return self.padded(none, none)

    @classmethod
    def of(cls, ctx: RuleContext, kernel: Sequence[Dim]) -> Window:
        """The window of a node with explicit padding, without that of auto_pad. Refuses a symbolic kernel size."""
        n = len(kernel)
        sizes = tuple(k for k in kernel if isinstance(k, int))
        if len(sizes) < n:
            ctx.refuse("kernel_shape", f"must be fixed, is {list(kernel)}")
        pads = [0] * (2 * n)
        if ctx.attribute("auto_pad", "NOTSET") == "NOTSET":
            pads = ctx.attribute("pads", pads)
        strides, dilations = ctx.attribute("strides", [1] * n), ctx.attribute("dilations", [1] * n)
        return cls(sizes, tuple(strides), tuple(dilations), tuple(pads[:n]), tuple(pads[n:]))


def suits_kernels(x: ir.Value, window: Window) -> bool:
    """Whether the kernel pack has the convolution of `x`: float32, two spatial axes, padding that adds."""
    return dtype_of(x) == ir.DataType.FLOAT and len(window.kernel) == 2 and min(window.pads) >= 0


def split_padding(totals: Sequence[int], upper: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Padding before and after; the odd element comes after for SAME_UPPER, before for SAME_LOWER."""
    small, large = tuple(t // 2 for t in totals), tuple(t - t // 2 for t in totals)
    return (small, large) if upper else (large, small)


def sliding_window(ctx: RuleContext, kernel: Sequence[Dim], fill: float = 0.0) -> tuple[Window, ir.Value, Cut]:
    """The window of a Conv or pooling node, the input that it slides over, and the way back to the node's input.

    The input is the node's own and the way back the identity, except for auto_pad=SAME_* whose padding depends on
    symbolic sizes: then the input is padded in the graph, with `fill`, and the way back cuts the padding off.
    """
    window, x = Window.of(ctx, kernel), ctx.input(0)
    mode = ctx.attribute("auto_pad", "NOTSET")
    if mode not in ("SAME_UPPER", "SAME_LOWER"):
        return window, x, lambda g: g
    # SAME: the output has ceil(size / stride) positions; the last one starts stride * (positions - 1) after the first.
    totals: list[int] = []
    for size, extent, stride in zip(dims(x)[2:], window.extent, window.strides):
        if stride == 1:  # the same whatever the size
            totals.append(extent - 1)
        elif isinstance(size, int):
            totals.append(max((-(-size // stride) - 1) * stride + extent - size, 0))
        else:
            return _padded_at_runtime(ctx.op, x, window, mode == "SAME_UPPER", fill)
    return window.padded(*split_padding(totals, mode == "SAME_UPPER")), x, lambda g: g


def _padded_at_runtime(
    op: Builder, x: ir.Value, window: Window, upper: bool, fill: float
) -> tuple[Window, ir.Value, Cut]:
    n = len(window.kernel)
    size = op.Shape(x, start=2)
    strides = np.array(window.strides, np.int64)
    # (ceil(size / stride) - 1) * stride, with integers only: ceil(n / s) - 1 = floor((n - 1) / s) for n > 0.
    last = op.Mul(op.Div(op.Sub(size, 1), strides), strides)
    total = op.Max(op.Sub(op.Add(last, np.array(window.extent, np.int64)), size), 0)
    small = op.Div(total, 2)
    large = op.Sub(total, small)
    before, after = (small, large) if upper else (large, small)
    axes = list(range(2, n + 2))
    padded = op.Pad(x, op.Concat(before, after, axis=0), op.constant(fill, dtype_of(x)), axes)
    padded.shape = ir.Shape([*dims(x)[:2], *[None] * n])

    def cut(g: ir.Value) -> ir.Value:
        result = op.Slice(g, before, op.Add(before, size), axes)
        result.shape = x.shape
        return result

    return window.bare, padded, cut


def unfold(op: Builder, x: ir.Value, window: Window, channels: int) -> ir.Value:
    """Windows of `x` [batch, channels, *spatial] as [batch, channels * window.size, *output].

    A Conv with one group per channel, whose filter i is 1 at position i of the window and 0 elsewhere: four times
    faster than slicing on ONNX Runtime.
    """
    return op.Conv(x, _identity(op, x, window, channels), group=channels, **window.attributes)


def fold(op: Builder, windows: ir.Value, x: ir.Value, window: Window, channels: int) -> ir.Value:
    """The adjoint of `unfold`: each element of a window is added to the element of `x` that it was read from."""
    return transpose_convolution(op, windows, _identity(op, x, window, channels), x, window, channels)


def spread(op: Builder, g: ir.Value, x: ir.Value, window: Window, channels: int) -> ir.Value:
    """The adjoint of summing each window: add g [batch, channels, *output] to every element that its window reads."""
    before = [extent - 1 - pad for extent, pad in zip(window.extent, window.before)]
    after = [extent - 1 - pad for extent, pad in zip(window.extent, window.after)]
    if window.dense and min(*before, *after) >= 0:
        # At stride 1 an element of x gets the sum of a window of g of the same size: a pooling again, as the mean times
        # the window's size. extent - 1 - pad zeros around g give it the size of x.
        mean = op.AveragePool(g, kernel_shape=list(window.kernel), pads=[*before, *after], count_include_pad=1)
        result = op.Mul(mean, float(window.size))
        result.shape = x.shape
        return result
    ones = op.constant(np.ones((1, 1, *window.kernel), dtype_of(x).numpy()))
    return transpose_convolution(op, g, _per_channel(op, ones, channels), x, window, channels)


def transpose_convolution(
    op: Builder, g: ir.Value, weight: ir.Value, x: ir.Value, window: Window, group: int
) -> ir.Value:
    """The adjoint of Conv in its input `x`, by ConvTranspose; g [batch, filters, *output] -> the shape of x."""
    spatial = dims(x)[2:]
    attributes = dict(window.attributes)
    if is_static(spatial):
        # With a stride above 1 several sizes of x have the same output; the elements that no window reached are what
        # ConvTranspose has to append to come back to this one.
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
        result = op.ConvTranspose(g, weight, group=group, **attributes)
    else:
        # How many elements no window reached, at most stride - 1, is known at run time only: append as many, keep the
        # padding behind, then cut to the shape of x.
        n = len(spatial)
        attributes["output_padding"] = [stride - 1 for stride in window.strides]
        attributes["pads"] = [*window.before, *[0] * n]
        long = op.ConvTranspose(g, weight, group=group, **attributes)
        result = op.Slice(long, [0] * n, op.Shape(x, start=2), list(range(2, n + 2)))
    result.shape = x.shape
    return result


def mirror_kernel(
    op: Builder, weight: ir.Value, group: int, filters: int, per_group: int, kernel: Sequence[int]
) -> ir.Value:
    """[filters, per_group, *kernel] -> [group * per_group, filters / group, *kernel], spatial axes reversed.

    A product with the reversed identity matrix reverses seven times faster than Slice, and transposing matrices is
    faster than transposing tensors with more axes.
    """
    size = math.prod(kernel)
    # First [group, filters / group, per_group * size] -> [group, per_group * size, filters / group], then
    # [group * per_group, size, filters / group] -> [group * per_group, filters / group, size].
    turned = op.swap_last(op.Reshape(weight, [group, filters // group, per_group * size]))
    kernels = op.swap_last(op.Reshape(turned, [group * per_group, size, filters // group]))
    if size > 1:
        # Reversing the flattened kernel reverses all its spatial axes.
        kernels = op.MatMul(kernels, np.ascontiguousarray(np.eye(size, dtype=dtype_of(weight).numpy())[::-1]))
    return op.Reshape(kernels, [group * per_group, filters // group, *kernel])


def _identity(op: Builder, x: ir.Value, window: Window, channels: int) -> ir.Value:
    eye = np.eye(window.size, dtype=dtype_of(x).numpy()).reshape(window.size, 1, *window.kernel)
    return _per_channel(op, op.constant(eye), channels)


def _per_channel(op: Builder, kernel: ir.Value, channels: int) -> ir.Value:
    # Repeated by a node, not in the file, which stays small: the runtime folds the node when it loads the graph.
    return kernel if channels == 1 else op.Tile(kernel, [channels] + [1] * (len(dims(kernel)) - 1))
