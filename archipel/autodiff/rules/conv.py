"""Convolution and its transpose in any number of spatial dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, replace

import onnx_ir as ir

from archipel.autodiff.context import RuleContext
from archipel.autodiff.registry import Gradients, rule
from archipel.autodiff.rules.correlation import weight_gradient
from archipel.autodiff.rules.windows import (
    LAST,
    Window,
    mirror_kernel,
    sliding_window,
    split_padding,
    suits_kernels,
    transpose_convolution,
)
from archipel.graph.build import Builder
from archipel.graph.outline import outline
from archipel.graph.shapes import Dim, dims, static_size

# ONNX Runtime copies windows row by row: for rows shorter than this the calls cost more than the elements.
_NARROW = 8
_SWAP = "nchw->ncwh"


@rule("", "Conv")
def conv(ctx: RuleContext) -> Gradients:
    """X [batch, channels, *spatial], W [filters, channels / group, *kernel], B [filters]: strides, dilations, pads,
    auto_pad, group (ONNX Conv-11).

    Y is linear in X and in W: dX is the adjoint of the convolution, dW the correlation of X with g, dB the sum of g.
    """
    op, g, w = ctx.op, ctx.cotangent, ctx.input(1)
    filters, per_group, kernel = _weight_shape(ctx)
    group = ctx.attribute("group", 1)
    window, x, cut = sliding_window(ctx, kernel)
    grad_x = grad_w = None
    # Profiles name the parts.
    if ctx.wants(0):
        with op.part("input"):
            grad_x = cut(_input_gradient(op, g, x, w, window, group, filters, per_group))
    if ctx.wants(1):
        with op.part("weight"):
            grad_w = weight_gradient(op, g, x, window, group, filters, per_group)
        has_kernel = op.outlined is not None and suits_kernels(x, window)
        if x is ctx.input(0) and (has_kernel or _has_short_rows(dims(g), window, group, per_group)):
            # The forward pass gains from exchanged axes as well, and from a kernel for weights that change.
            with op.after(ctx.node), op.part("forward"):
                ctx.replace(_forward(op, x, w, ctx.optional(2), window, group, dims(ctx.output)))
    return [grad_x, grad_w, _bias_gradient(ctx, g)]


@rule("", "ConvTranspose")
def conv_transpose(ctx: RuleContext) -> Gradients:
    """X [batch, channels, *spatial], W [channels, filters / group, *kernel], B [filters]: strides, dilations, pads,
    output_padding, output_shape, auto_pad, group (ONNX ConvTranspose-11).

    It is the adjoint of a Conv that takes Y to X: dX is that Conv of g, and dW that Conv's weight gradient, with input
    and cotangent exchanged.
    """
    op, g, x, w = ctx.op, ctx.cotangent, ctx.input(0), ctx.input(1)
    channels, per_group, kernel = _weight_shape(ctx)
    group = ctx.attribute("group", 1)
    window = _transposed_window(ctx, kernel)
    spare = [-min(after, 0) for after in window.after]
    if any(spare):
        # The last elements of Y are output_padding that no element of X reaches: their cotangents go nowhere.
        n = len(spare)
        g = op.Slice(g, [0] * n, [-s if s else LAST for s in spare], list(range(2, n + 2)))
        window = replace(window, after=tuple(max(after, 0) for after in window.after))
    grad_x = grad_w = None
    if ctx.wants(0):
        grad_x = _convolve(op, g, w, None, window, group, dims(x))
    if ctx.wants(1):
        grad_w = weight_gradient(op, x, g, window, group, channels, per_group)
    return [grad_x, grad_w, _bias_gradient(ctx, ctx.cotangent)]


def _weight_shape(ctx: RuleContext) -> tuple[int, int, tuple[Dim, ...]]:
    shape = dims(ctx.input(1))
    first, second = shape[:2]
    if not (isinstance(first, int) and isinstance(second, int)):
        ctx.refuse("W", f"its channels must be fixed, its shape is {list(shape)}")
    return first, second, shape[2:]


def _bias_gradient(ctx: RuleContext, g: ir.Value) -> ir.Value | None:
    if not ctx.wants(2):
        return None
    return ctx.op.ReduceSum(g, [0, *range(2, len(dims(ctx.output)))], keepdims=0)


def _transposed_window(ctx: RuleContext, kernel: Sequence[Dim]) -> Window:
    """The window that slides over Y; `after` is negative where output_padding reaches beyond the last window."""
    window = Window.of(ctx, kernel)
    n = len(kernel)
    extra = ctx.attribute("output_padding", None) or [0] * n
    shape = ctx.attribute("output_shape", None)
    mode = ctx.attribute("auto_pad", "NOTSET")
    # Without padding Y has stride * (size - 1) + extent elements for `size` elements of X; padding cuts some off.
    sizes = dims(ctx.input(0))[2:]
    if shape:
        if not all(isinstance(size, int) for size in sizes):
            ctx.refuse("output_shape", f"the padding depends on spatial sizes that are not fixed: {list(sizes)}")
        full = [s * (size - 1) + e for s, size, e in zip(window.strides, sizes, window.extent) if isinstance(size, int)]
        shape = shape[-n:]
        before, _ = split_padding([max(f + o - y, 0) for f, o, y in zip(full, extra, shape)], mode == "SAME_UPPER")
        return window.padded(before, [f - b - y for f, b, y in zip(full, before, shape)])
    before, after = window.before, window.after
    if mode in ("SAME_UPPER", "SAME_LOWER"):
        totals = [max(e + o - s, 0) for e, o, s in zip(window.extent, extra, window.strides)]
        before, after = split_padding(totals, mode == "SAME_UPPER")
    return window.padded(before, [a - o for a, o in zip(after, extra)])


def _forward(
    op: Builder, x: ir.Value, w: ir.Value, b: ir.Value | None, window: Window, group: int, shape: Sequence[Dim]
) -> ir.Value:
    def body(op: Builder, x: ir.Value, w: ir.Value, b: ir.Value | None) -> list[ir.Value]:
        return [_convolve(op, x, w, b, window, group, shape)]

    if not suits_kernels(x, window):
        return body(op, x, w, b)[0]
    return outline(op, "Conv", [x, w, b], body, group=group, **window.attributes)[0]


def _input_gradient(
    op: Builder, g: ir.Value, x: ir.Value, w: ir.Value, window: Window, group: int, filters: int, per_group: int
) -> ir.Value:
    def body(op: Builder, g: ir.Value, w: ir.Value) -> list[ir.Value]:
        return [_standard_input_gradient(op, g, x, w, window, group, filters, per_group)]

    sizes = [size for size in dims(x)[2:] if isinstance(size, int)]
    if not suits_kernels(x, window) or len(sizes) < len(window.kernel):
        return body(op, g, w)[0]
    return outline(op, "ConvGradInput", [g, w], body, group=group, input_size=sizes, **window.attributes)[0]


def _standard_input_gradient(
    op: Builder, g: ir.Value, x: ir.Value, w: ir.Value, window: Window, group: int, filters: int, per_group: int
) -> ir.Value:
    """At stride 1 a Conv of g with the mirrored kernel, else ConvTranspose; both are the adjoint.

    Conv unfolds g into windows, ConvTranspose folds windows of X's gradient. The latter copies less where X has fewer
    channels than g or g fewer positions.
    """
    before = [extent - 1 - pad for extent, pad in zip(window.extent, window.before)]
    after = [extent - 1 - pad for extent, pad in zip(window.extent, window.after)]
    have, want = static_size(dims(x)[2:]), static_size(dims(g)[2:])
    # 1.25 was found by trial: up to there g has about as many positions as X.
    alike = have is None or want is None or have <= 1.25 * want
    dense = filters // group <= per_group and alike
    if set(window.strides) != {1} or min(*before, *after) < 0 or not (dense or window.size == 1):
        return transpose_convolution(op, g, w, x, window, group)
    kernel = mirror_kernel(op, w, group, filters, per_group, window.kernel)
    return _convolve(op, g, kernel, None, window.padded(before, after), group, dims(x))


def _convolve(
    op: Builder, x: ir.Value, w: ir.Value, b: ir.Value | None, window: Window, group: int, shape: Sequence[Dim]
) -> ir.Value:
    """Conv with an output of this shape; a depthwise one with short rows and long columns works with both exchanged."""
    if not _has_short_rows(shape, window, group, dims(w)[1]):
        result = op.Conv(x, w, b, group=group, **window.attributes)
    else:
        turned = Window(*(part[::-1] for part in astuple(window)))  # height and width exchanged in every field
        # Einsum instead of Transpose, which takes many times longer here with several threads (benchmarks/traps.py).
        flat, upright = (op.Einsum(x, equation=_SWAP), op.swap_last(w))
        result = op.Einsum(op.Conv(flat, upright, b, group=group, **turned.attributes), equation=_SWAP)
    result.shape = ir.Shape(shape)
    return result


def _has_short_rows(shape: Sequence[Dim], window: Window, group: int, per_group: Dim) -> bool:
    """Whether the Conv is depthwise with an output [batch, channels, height, width] of short rows and long columns."""
    if len(window.kernel) != 2 or window.size == 1 or group == 1 or per_group != 1:
        return False
    height, width = shape[2:]
    return isinstance(height, int) and isinstance(width, int) and width <= _NARROW and height >= 2 * width
