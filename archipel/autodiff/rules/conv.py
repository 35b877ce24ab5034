"""Convolution in any number of spatial dimensions."""

from __future__ import annotations

import onnx_ir as ir

from archipel.autodiff.context import RuleContext
from archipel.autodiff.registry import Gradients, rule
from archipel.autodiff.rules.windows import Window, flip, transposed, unfold
from archipel.graph.build import Builder
from archipel.graph.shapes import dims


@rule("", "Conv")
def conv(ctx: RuleContext) -> Gradients:
    """X [batch, channels, *spatial], W [filters, channels / group, *kernel], B [filters]: strides, dilations, pads,
    auto_pad, group (ONNX Conv-11)."""
    op, g, x, w = ctx.op, ctx.cotangent, ctx.input(0), ctx.input(1)
    shape = dims(w)
    if not (isinstance(shape[0], int) and isinstance(shape[1], int)):
        ctx.refuse("W", f"its channels must be fixed, its shape is {list(shape)}")
    filters, per_group = shape[0], shape[1]
    group = ctx.attribute("group", 1)
    window = Window.of(ctx, shape[2:])
    grad_x = grad_w = grad_b = None
    if ctx.wants(0):
        grad_x = _input_gradient(op, g, x, w, window, group, filters, per_group)
    if ctx.wants(1):
        grad_w = op.reshape_like(_weight_gradient(op, g, x, window, group, filters, per_group), w)
    if ctx.wants(2):
        grad_b = op.ReduceSum(g, [0, *range(2, len(shape))], keepdims=0)
    return [grad_x, grad_w, grad_b]


def _input_gradient(
    op: Builder, g: ir.Value, x: ir.Value, w: ir.Value, window: Window, group: int, filters: int, per_group: int
) -> ir.Value:
    before = [extent - 1 - pad for extent, pad in zip(window.extent, window.before)]
    after = [extent - 1 - pad for extent, pad in zip(window.extent, window.after)]
    if any(stride != 1 for stride in window.strides) or min(*before, *after) < 0:
        return transposed(op, g, w, x, window, group)
    # At stride 1 a Conv with the flipped kernel is faster than ConvTranspose.
    kernel = flip(op, w)
    inner = list(range(2, len(window.kernel) + 2))
    if group == 1:
        kernel = op.Transpose(kernel, perm=[1, 0, *inner])
    elif (filters, per_group) != (group, 1):
        split = op.Reshape(kernel, [group, filters // group, per_group, *window.kernel])
        swapped = op.Transpose(split, perm=[0, 2, 1, *(axis + 1 for axis in inner)])
        kernel = op.Reshape(swapped, [group * per_group, filters // group, *window.kernel])
    result: ir.Value = op.Conv(
        g,
        kernel,
        group=group,
        kernel_shape=list(window.kernel),
        dilations=list(window.dilations),
        pads=[*before, *after],
    )
    return result


def _weight_gradient(
    op: Builder, g: ir.Value, x: ir.Value, window: Window, group: int, filters: int, per_group: int
) -> ir.Value:
    """[filters, channels / group * window.size]: output gradients times windows, summed over batch and positions."""
    pointwise = window.size == 1 and set(window.strides) == {1} and not any(window.pads)
    windows = x if pointwise else unfold(op, x, window, group * per_group)
    # In a Reshape 0 keeps the batch axis.
    if group == 1:
        rows = op.Reshape(g, [0, filters, -1])
        columns = op.Reshape(windows, [0, per_group * window.size, -1])
    else:
        rows = op.Reshape(g, [0, group, filters // group, -1])
        columns = op.Reshape(windows, [0, group, per_group * window.size, -1])
    total: ir.Value = op.ReduceSum(op.MatMul(rows, op.swap_last(columns)), [0], keepdims=0)
    return total
