"""Pooling: the maximum or the mean of each window. Windows that lie side by side (`_tiles`) have a faster gradient."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from archipel.autodiff.context import RuleContext
from archipel.autodiff.registry import Gradients, rule
from archipel.autodiff.rules.windows import Window, fold, sliding_window, spread, unfold
from archipel.graph.build import Builder
from archipel.graph.shapes import Dim, dims, dtype_of, is_static, rank, static_size


@rule("", "MaxPool")
def max_pool(ctx: RuleContext) -> Gradients:
    """g goes to the maximum of its window; n elements that share it get g / n each, as in PyTorch's amax (ONNX
    MaxPool-12).

    Found by comparing with the maximum: ONNX Runtime's fast kernel does not compute the operator's Indices output.
    """
    # Padding must not be a maximum; it is finite because `unfold` multiplies it by zero.
    lowest = float(np.finfo(dtype_of(ctx.input(0)).numpy()).min)
    window, x, cut = sliding_window(ctx, ctx.attribute("kernel_shape", []), lowest)
    if _tiles(ctx, window):
        return [_tiled_max(ctx.op, ctx.cotangent, x, ctx.output, window)]
    return [cut(_general_max(ctx, x, window, lowest))]


@rule("", "AveragePool")
def average_pool(ctx: RuleContext) -> Gradients:
    """Each element of a window gets g / the number of elements that the window counts: count_include_pad, ceil_mode,
    dilations, auto_pad (ONNX AveragePool-19)."""
    op = ctx.op
    window, x, cut = sliding_window(ctx, ctx.attribute("kernel_shape", []))
    g = _divided_by_counts(ctx, window)
    if _tiles(ctx, window):
        return [_fill_up(op, _repeat(op, g, window, dims(x)), x, window)]
    return [cut(spread(op, g, x, _rounded_up(ctx, window), _channels(ctx)))]


@rule("", "GlobalAveragePool")
def global_average_pool(ctx: RuleContext) -> Gradients:
    """Each of n positions gets g / n."""
    op, g, x = ctx.op, ctx.cotangent, ctx.input(0)
    count = static_size(dims(x)[2:])
    if count is not None:
        return [op.expand_like(op.Mul(g, 1.0 / max(count, 1)), x)]
    area = op.ReduceProd(op.Cast(op.Shape(x, start=2), to=int(dtype_of(x))), keepdims=0)
    return [op.expand_like(op.Div(g, area), x)]


@rule("", "GlobalMaxPool")
def global_max_pool(ctx: RuleContext) -> Gradients:
    """g goes to the maximum; n elements that share it get g / n each."""
    op, x = ctx.op, ctx.input(0)
    mask = op.Cast(op.Equal(x, ctx.output), to=int(dtype_of(x)))
    ties = op.ReduceSum(mask, list(range(2, rank(x))), keepdims=1)
    return [op.Mul(mask, op.Div(ctx.cotangent, ties))]


def _channels(ctx: RuleContext) -> int:
    channels = dims(ctx.input(0))[1]
    if not isinstance(channels, int):
        ctx.refuse("X", f"its channels must be fixed, its shape is {list(dims(ctx.input(0)))}")
    return channels


def _tiles(ctx: RuleContext, window: Window) -> bool:
    """Whether the windows lie side by side inside the input: neither overlapping nor reaching into padding."""
    if window.kernel != window.strides or set(window.dilations) != {1} or any(window.pads):
        return False
    sizes = dims(ctx.input(0))[2:]
    # Sizes that are multiples of the window leave nothing to pad or round, whatever auto_pad and ceil_mode say.
    exact = all(isinstance(s, int) and s % k == 0 for s, k in zip(sizes, window.kernel))
    mode = ctx.attribute("auto_pad", "NOTSET")
    return exact or (mode in ("NOTSET", "VALID") and not ctx.attribute("ceil_mode", 0))


def _uncovered(x: ir.Value, window: Window) -> list[int] | None:
    """Per axis the elements behind the last whole window; None if a size is symbolic."""
    sizes = [d for d in dims(x)[2:] if isinstance(d, int)]
    return [s % k for s, k in zip(sizes, window.kernel)] if len(sizes) == len(window.kernel) else None


def _repeat(op: Builder, value: ir.Value, window: Window, shape: tuple[Dim, ...]) -> ir.Value:
    """Each value repeated over its window, by a Resize to whole multiples; `shape` is that of the pooled input."""
    # asymmetric coordinates rounded down: output element i reads input element i // kernel.
    scales = np.array([1, 1, *window.kernel], np.float32)
    result = op.Resize(
        value, None, scales, mode="nearest", coordinate_transformation_mode="asymmetric", nearest_mode="floor"
    )
    spatial = [d - d % k if isinstance(d, int) else None for d, k in zip(shape[2:], window.kernel)]
    result.shape = ir.Shape([*shape[:2], *spatial])
    return result


def _fill_up(op: Builder, g: ir.Value, x: ir.Value, window: Window) -> ir.Value:
    """Append zeros for the elements behind the last whole window."""
    n = len(window.kernel)
    rest = _uncovered(x, window)
    if rest is None:  # symbolic sizes: how many elements are missing is computed
        missing = op.Sub(op.Shape(x, start=2), op.Shape(g, start=2))
        g = op.Pad(g, op.Concat(op.constant([0] * (n + 4)), missing, axis=0))
    elif any(rest):
        g = op.Pad(g, [0] * (n + 4) + rest)
    g.shape = x.shape
    return g


def _tiled_max(op: Builder, g: ir.Value, x: ir.Value, y: ir.Value, window: Window) -> ir.Value:
    """Windows side by side: repeat each maximum over its window and compare."""
    inner = list(window.kernel)
    n = len(inner)
    highest = _repeat(op, y, window, dims(x))
    rest = _uncovered(x, window)
    part = x
    if rest is None:
        part = op.Slice(x, [0] * n, op.Shape(highest, start=2), list(range(2, n + 2)))
    elif any(rest):
        ends = [d - r for d, r in zip(dims(x)[2:], rest) if isinstance(d, int)]
        part = op.Slice(x, [0] * n, ends, list(range(2, n + 2)))
    mask = op.Cast(op.Equal(part, highest), to=int(dtype_of(x)))
    # The mean of the mask is n / size for n equal maxima, so (g / size) / share = g / n.
    share = op.AveragePool(mask, kernel_shape=inner, strides=inner)
    divided = op.Div(op.Mul(g, 1.0 / window.size), share)
    return _fill_up(op, op.Mul(_repeat(op, divided, window, dims(x)), mask), x, window)


def _general_max(ctx: RuleContext, x: ir.Value, plain: Window, lowest: float) -> ir.Value:
    """Windows that overlap or reach into the padding: unfold them, compare with their maxima, and fold back."""
    op, g, y = ctx.op, ctx.cotangent, ctx.output
    channels, window = _channels(ctx), _rounded_up(ctx, plain)
    padded = x
    if any(window.pads):
        # The lowest number, not minus infinity: unfolding multiplies it by zero.
        pads = [0, 0, *window.before, 0, 0, *window.after]
        padded = op.Pad(x, pads, op.constant(lowest, dtype_of(x)))
    windows = _cut_to_output(ctx, unfold(op, padded, window.bare, channels), plain)
    # [batch, channels, elements of a window, windows]; maxima and cotangents have one element there and broadcast.
    windows = op.Reshape(windows, [0, channels, window.size, -1])
    mask = op.Cast(op.Equal(windows, op.Reshape(y, [0, channels, 1, -1])), to=int(dtype_of(x)))
    share = op.ReduceSum(mask, [2], keepdims=1)
    parts = op.Mul(mask, op.Div(op.Reshape(g, [0, channels, 1, -1]), share))
    stacked = op.Concat(op.constant([0, channels * window.size]), op.Shape(y, start=2), axis=0)
    return fold(op, op.Reshape(parts, stacked), x, window, channels)


def _rounded_up(ctx: RuleContext, window: Window) -> Window:
    """With ceil_mode the last window may reach beyond the padding. With stride - 1 more elements of padding, rounding
    down, as Conv does, gives as many windows."""
    if not ctx.attribute("ceil_mode", 0):
        return window
    return window.padded(window.before, [after + stride - 1 for after, stride in zip(window.after, window.strides)])


def _cut_to_output(ctx: RuleContext, value: ir.Value, window: Window) -> ir.Value:
    """Cut off windows that would start behind the input, which runtimes leave out with ceil_mode.

    Only for symbolic sizes: a model whose fixed sizes give such a window is refused at import.
    """
    # A last window can start behind the input only if stride + padding exceed the extent on some axis.
    late = (s + a > e for s, a, e in zip(window.strides, window.after, window.extent))
    if not ctx.attribute("ceil_mode", 0) or is_static(dims(ctx.input(0))[2:]) or not any(late):
        return value
    n = len(window.kernel)
    return ctx.op.Slice(value, [0] * n, ctx.op.Shape(ctx.output, start=2), list(range(2, n + 2)))


def _divided_by_counts(ctx: RuleContext, window: Window) -> ir.Value:
    """The cotangent over the number of elements that AveragePool divides each window by."""
    op, g = ctx.op, ctx.cotangent
    include, up = ctx.attribute("count_include_pad", 0), ctx.attribute("ceil_mode", 0)
    same = ctx.attribute("auto_pad", "NOTSET").startswith("SAME")
    padded = any(window.pads) or same
    sizes = dims(ctx.input(0))[2:]
    if not up and (include or not padded):
        scaled = op.Mul(g, 1.0 / window.size)  # every window counts all of its elements
    elif is_static(sizes):
        # A window counts the product of what it counts on each axis.
        counts = np.ones(1)
        for axis, size in enumerate(sizes):
            if isinstance(size, int):
                counts = np.multiply.outer(counts, _counts(window, axis, size, include, up))
        scaled = op.Mul(g, (1.0 / np.maximum(counts, 1))[None].astype(dtype_of(g).numpy()))
    else:
        scaled = op.Div(g, op.Max(_counts_at_runtime(ctx, window, include), 1.0))
    scaled.shape = g.shape
    return scaled


def _counts(window: Window, axis: int, size: int, include: int, up: int) -> np.ndarray:
    """The elements that each window counts along one axis; never those beyond the padding, which ceil_mode reaches."""
    k, stride, step = window.kernel[axis], window.strides[axis], window.dilations[axis]
    before, after, extent = window.before[axis], window.after[axis], window.extent[axis]
    positions = (size + before + after - extent + (stride - 1 if up else 0)) // stride + 1
    # The position of every element that each window reads, [windows, kernel], counted from the padding's start.
    taken = np.arange(positions)[:, None] * stride + np.arange(k) * step
    first, last = (0, size + before + after) if include else (before, before + size)
    return np.asarray(((taken >= first) & (taken < last)).sum(1))


def _counts_at_runtime(ctx: RuleContext, window: Window, include: int) -> ir.Value:
    """The counts for symbolic spatial sizes, [1, 1, *output]: ones, summed over each window by a Conv."""
    op, n = ctx.op, len(window.kernel)
    dtype = dtype_of(ctx.cotangent)
    one = ir.tensor(np.ones(1, dtype.numpy()))
    ones = op.ConstantOfShape(op.Concat([1, 1], op.Shape(ctx.input(0), start=2), axis=0), value=one)
    kernel = op.constant(np.ones((1, 1, *window.kernel), dtype.numpy()))
    attributes = dict(window.attributes)
    mode = ctx.attribute("auto_pad", "NOTSET")
    if mode.startswith("SAME"):
        del attributes["pads"]
        return op.Conv(ones, kernel, auto_pad=mode, **attributes)
    wide = _rounded_up(ctx, window)
    if include:
        # Ones for the padding that counts; Conv pads with zeros what ceil_mode adds behind it.
        ones = op.Pad(ones, [0, 0, *window.before, 0, 0, *window.after], op.constant(1.0, dtype))
        wide = wide.padded([0] * n, [w - a for w, a in zip(wide.after, window.after)])
    return _cut_to_output(ctx, op.Conv(ones, kernel, **wide.attributes), window)
