"""Pooling."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from archipel.autodiff.context import RuleContext
from archipel.autodiff.registry import Gradients, rule
from archipel.autodiff.rules.windows import Window, fold, unfold
from archipel.graph.build import Builder
from archipel.graph.shapes import dims, dtype_of, is_static


@rule("", "MaxPool")
def max_pool(ctx: RuleContext) -> Gradients:
    """Where several elements of a window share the maximum they share its gradient equally (as PyTorch's amax does).

    The operator's own Indices output would say which one was taken, but asking for it leaves ONNX Runtime's fast
    kernel; comparing with the maximum does not.
    """
    x, y = ctx.input(0), ctx.output
    window = Window.of(ctx, ctx.attribute("kernel_shape", []))
    spatial = dims(x)[2:]
    tiled = (
        window.kernel == window.strides
        and set(window.dilations) == {1}
        and not any(window.pads)
        and is_static(spatial)
        and all(isinstance(d, int) and d * k <= s for d, k, s in zip(dims(y)[2:], window.kernel, spatial))  # type: ignore[operator]
    )
    if tiled:
        return [_tiled(ctx.op, ctx.cotangent, x, y, window)]
    return [_general(ctx, window)]


def _tiled(op: Builder, g: ir.Value, x: ir.Value, y: ir.Value, window: Window) -> ir.Value:
    """Windows side by side: repeat the maximum over its window and compare."""
    inner, axes = list(window.kernel), list(range(2, len(window.kernel) + 2))
    covered = [d * k for d, k in zip(dims(y)[2:], inner) if isinstance(d, int)]
    rest = [s - c for s, c in zip(dims(x)[2:], covered) if isinstance(s, int)]
    part = op.Slice(x, [0] * len(axes), covered, axes) if any(rest) else x
    mask = op.Cast(op.Equal(part, _repeat(op, y, window, part)), to=int(dtype_of(x)))
    share = op.AveragePool(mask, kernel_shape=inner, strides=inner)
    each = op.Div(op.Mul(g, 1.0 / window.size), share)
    result: ir.Value = op.Mul(_repeat(op, each, window, part), mask)
    if any(rest):
        result = op.Pad(result, [0] * (len(axes) + 2) + [0, 0, *rest])
    return result


def _repeat(op: Builder, value: ir.Value, window: Window, like: ir.Value) -> ir.Value:
    scales = np.array([1, 1, *window.kernel], np.float32)
    result: ir.Value = op.Resize(
        value, None, scales, mode="nearest", coordinate_transformation_mode="asymmetric", nearest_mode="floor"
    )
    result.shape = like.shape
    return result


def _general(ctx: RuleContext, window: Window) -> ir.Value:
    """Windows that overlap or reach into the padding: lay them out one by one, compare, and add back."""
    op, g, x, y = ctx.op, ctx.cotangent, ctx.input(0), ctx.output
    shape = dims(x)
    channels = shape[1]
    if not isinstance(channels, int):
        ctx.refuse("X", f"its channels must be fixed, its shape is {list(shape)}")
    window = _covering(ctx, window)
    lowest = float(np.finfo(dtype_of(x).numpy()).min)
    padded = x
    if any(window.pads):
        # The lowest number, not minus infinity: unfolding multiplies it by zero.
        pads = [0, 0, *window.before, 0, 0, *window.after]
        padded = op.Pad(x, pads, op.constant(lowest, dtype_of(x)))
    bare = Window(window.kernel, window.strides, window.dilations, *((0,) * len(window.kernel),) * 2)
    windows = op.Reshape(unfold(op, padded, bare, channels), [0, channels, window.size, -1])
    mask = op.Cast(op.Equal(windows, op.Reshape(y, [0, channels, 1, -1])), to=int(dtype_of(x)))
    share = op.ReduceSum(mask, [2], keepdims=1)
    each = op.Mul(mask, op.Div(op.Reshape(g, [0, channels, 1, -1]), share))
    stacked = op.Concat(op.constant([0, channels * window.size]), op.Shape(y, start=2), axis=0)
    return fold(op, op.Reshape(each, stacked), x, window, channels)


def _covering(ctx: RuleContext, window: Window) -> Window:
    """With ceil_mode the last window may reach beyond the padding: pad up to its end."""
    if not ctx.attribute("ceil_mode", 0):
        return window
    after = []
    for size, stride, extent, before, pad in zip(
        dims(ctx.input(0))[2:], window.strides, window.extent, window.before, window.after
    ):
        if not isinstance(size, int):
            ctx.refuse("ceil_mode=1", f"the spatial size must be fixed, is {size!r}")
        last = -(-(size + before + pad - extent) // stride) * stride
        if last >= size + before:
            # PyTorch and ONNX Runtime leave such a window out, ONNX's shape inference counts it (fixed in opset 22).
            ctx.refuse("ceil_mode=1", "a window would start behind the input; use ceil_mode=0 with larger pads")
        after.append(max(last + extent - size - before, pad))
    return Window(window.kernel, window.strides, window.dilations, window.before, tuple(after))
