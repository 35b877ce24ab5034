"""InstanceNormalization and GroupNormalization: each channel, or group of channels, of an example on its own.

Reshaped to one example whose channels are all these rows, [1, batch * rows, elements], both are BatchNormalizations in
training mode. (Ulyanov et al. 2016; Wu and He 2018.)
"""

from __future__ import annotations

import onnx_ir as ir

from archipel.autodiff.context import ForwardContext, NodeContext, RuleContext
from archipel.autodiff.registry import Gradients, Tangents, forward_rule, rule
from archipel.autodiff.rules.normalization import (
    EPSILON,
    HALVES,
    backward,
    cast,
    count_elements_per,
    fill,
    normalize_batch,
    project,
)
from archipel.graph.build import Builder
from archipel.graph.shapes import dims, dtype_of, fixed_sizes, is_static, rank


@rule("", "InstanceNormalization")
def instance_normalization(ctx: RuleContext) -> Gradients:
    """input [batch, channels, *spatial], scale and B [channels] (ONNX InstanceNormalization-6)."""
    op, x, scale, bias = ctx.op, ctx.input(0), ctx.input(1), ctx.input(2)
    channels, epsilon = _channels(ctx, scale), ctx.attribute("epsilon", EPSILON)
    with op.after(ctx.node):
        rows, scales = _rows(op, x, channels), _each_example(op, scale, x)
        y, batch = normalize_batch(op, rows, scales, _each_example(op, bias, x), epsilon)
        ctx.replace(op.reshape_like(y, x))
    grad_x, per_scale, per_bias = backward(op, rows, _rows(op, ctx.cotangent, channels), batch, scales)
    # `backward` gives means per row: times the row's elements, and summed over the examples.
    count = count_elements_per(op, batch.mean, rows)
    summed = [
        op.Mul(op.ReduceSum(op.Reshape(v, [-1, channels]), [0], keepdims=0), count) for v in (per_scale, per_bias)
    ]
    return [op.reshape_like(grad_x, x), *summed]


@rule("", "GroupNormalization")
def group_normalization(ctx: RuleContext) -> Gradients:
    """X [batch, channels, *spatial], scale and bias [channels], num_groups, stash_type (ONNX GroupNormalization-21)."""
    op, inputs = ctx.op, [ctx.input(i) for i in range(3)]
    channels, groups = _channels(ctx, inputs[1]), ctx.attribute("num_groups", 1)
    epsilon, dtype = ctx.attribute("epsilon", EPSILON), dtype_of(inputs[0])
    # Types of 16 bits are normalized in the type that stash_type names; 32 and 64 bits stay.
    compute = ir.DataType(ctx.attribute("stash_type", 1)) if dtype in HALVES else dtype
    with op.after(ctx.node):
        x, scale, bias = (cast(op, v, compute) for v in inputs)
        rows = _rows(op, x, groups)
        sizes = op.Slice(op.shape_of(rows), [1], [2])
        one, zero = (op.Expand(op.constant([content], compute), sizes) for content in (1.0, 0.0))
        normalized, batch = normalize_batch(op, rows, one, zero, epsilon)
        affine = [fill(op, scale, 0.0), fill(op, scale, 1.0)]
        # Scale and bias are per channel, not per group: a BatchNormalization with mean 0 and variance 1 applies them.
        y = op.BatchNormalization(op.reshape_like(normalized, x), scale, bias, *affine, epsilon=0.0)
        ctx.replace(cast(op, y, dtype))
    g = cast(op, ctx.cotangent, compute)
    inner = list(range(2, rank(x)))
    # Means of g and g X over each channel of each example, [batch, channels]; every other sum follows from these.
    # `along` is mean(g X^) = (mean(g X) - mean mean(g)) / deviation, with the statistics of the channel's group.
    of_g, of_product = (op.ReduceMean(v, inner, keepdims=0) if inner else v for v in (g, op.Mul(g, x)))
    split = [0, groups, channels // groups]
    column = [-1, groups, 1]
    grouped = op.Reshape(of_g, split)
    deviation = op.Reshape(op.Sqrt(op.Add(batch.var, epsilon)), column)
    centered = op.Sub(op.Reshape(of_product, split), op.Mul(op.Reshape(batch.mean, column), grouped))
    along = op.Div(centered, deviation)
    per_group = op.Reshape(scale, [groups, channels // groups])
    # dX = (scale g - mean(scale g X^) X^ - mean(scale g)) / deviation, with means over the group.
    slope, shift = (op.Reshape(op.ReduceMean(op.Mul(v, per_group), [2], keepdims=0), [-1]) for v in (along, grouped))
    scaled = op.Mul(g, op.Reshape(scale, [channels] + [1] * len(inner)))
    grad_x = project(op, rows, _rows(op, scaled, groups), batch, slope, shift)
    count = count_elements_per(op, of_g, x)
    summed = [op.Mul(op.Reshape(op.ReduceSum(v, [0], keepdims=0), [channels]), count) for v in (along, grouped)]
    grads = [op.reshape_like(grad_x, x), *summed]
    return [cast(op, v, dtype_of(given)) for v, given in zip(grads, inputs)]


@forward_rule("", "InstanceNormalization", "GroupNormalization")
def push_group(ctx: ForwardContext) -> Tangents:
    """dY = scale dX^ + dscale X^ + dB with dX^ = (dX - mean dX - X^ mean(dX X^)) / deviation, means over a group."""
    op, given, dtype = ctx.op, ctx.input(0), dtype_of(ctx.input(0))
    channels = _channels(ctx, ctx.input(1))
    groups = ctx.attribute("num_groups", channels)
    compute = ir.DataType(ctx.attribute("stash_type", 1)) if dtype in HALVES else dtype
    x, moved = cast(op, given, compute), [None if v is None else cast(op, v, compute) for v in ctx.tangents]
    per_channel = [channels] + [1] * (rank(given) - 2)
    rows = op.Reshape(x, [0, groups, -1])
    away = op.Sub(rows, op.ReduceMean(rows, [2], keepdims=1))
    var = op.ReduceMean(op.Mul(away, away), [2], keepdims=1)
    deviation = op.Sqrt(op.Add(var, ctx.attribute("epsilon", EPSILON)))
    normal = op.Div(away, deviation)
    parts: list[ir.Value] = []
    if moved[0] is not None:
        along = op.Reshape(moved[0], [0, groups, -1])
        share = op.Mul(normal, op.ReduceMean(op.Mul(along, normal), [2], keepdims=1))
        left = op.Div(op.Sub(op.Sub(along, op.ReduceMean(along, [2], keepdims=1)), share), deviation)
        scale = op.Reshape(cast(op, ctx.input(1), compute), per_channel)
        parts.append(op.Mul(op.reshape_like(left, given), scale))
    if moved[1] is not None:
        parts.append(op.Mul(op.reshape_like(normal, given), op.Reshape(moved[1], per_channel)))
    if moved[2] is not None:
        shift = op.Reshape(moved[2], per_channel)
        parts.append(shift if parts else op.expand_like(shift, given))
    total = parts[0] if parts else None
    for part in parts[1:]:
        total = part if total is None else op.Add(total, part)
    return [None if total is None else cast(op, total, dtype)]


def _channels(ctx: NodeContext, scale: ir.Value) -> int:
    for size in (dims(scale)[0], dims(ctx.input(0))[1]):
        if isinstance(size, int):
            return size
    ctx.refuse("scale", f"its size must be fixed, its shape is {list(dims(scale))}")


def _rows(op: Builder, x: ir.Value, per_example: int) -> ir.Value:
    """[batch, channels, *spatial] as [1, batch * per_example, the rest]."""
    batch = dims(x)[0]
    if isinstance(batch, int):
        return op.Reshape(x, [1, batch * per_example, -1])
    rows = op.Mul(op.Shape(x, end=1), [per_example])
    result = op.Reshape(x, op.Concat([1], rows, [-1], axis=0))
    result.shape = ir.Shape([1, None, None])
    return result


def _each_example(op: Builder, per_channel: ir.Value, x: ir.Value) -> ir.Value:
    """[channels] -> [batch * channels]"""
    both = dims(x)[:2]
    target = fixed_sizes(both) if is_static(both) else op.Shape(x, end=2)
    return op.Reshape(op.Expand(per_channel, target), [-1])
