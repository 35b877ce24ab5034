"""LayerNormalization and LpNormalization."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from archipel.autodiff.context import ForwardContext, NodeContext, RuleContext
from archipel.autodiff.registry import Gradients, Tangents, forward_rule, rule
from archipel.autodiff.rules.normalization import EPSILON, HALVES, Statistics, cast, project
from archipel.graph.build import Builder
from archipel.graph.shapes import dims, dtype_of, fixed_sizes, is_static, rank, static_size


@rule("", "LayerNormalization")
def layer_normalization(ctx: RuleContext) -> Gradients:
    """X [*rows, *normalized], Scale and B broadcast to [*normalized]; cotangents of Mean and InvStdDev count as well
    (ONNX LayerNormalization-17; Ba et al. 2016).

    With X^ = (X - mean) / deviation and s the scale: dX = (g s - mean(g s X^) X^ - mean(g s)) / deviation for each row,
    dScale = sum over rows of g X^, dB = sum of g. X is a matrix [rows, columns] here. Every sum is a product of g or
    g X with a vector, so X^ is never computed; BatchNormalization scales and shifts the rows as its channels.
    """
    op, given, n = ctx.op, ctx.input(0), rank(ctx.input(0))
    axis = ctx.attribute("axis", -1) % n
    stash = ir.DataType(ctx.attribute("stash_type", 1))
    dtype = stash if dtype_of(given) in HALVES else dtype_of(given)
    x = op.Flatten(cast(op, given, dtype), axis=axis)
    scale = _columns(ctx, 1, axis, dtype)
    mean, inverse = (_row(op, v, dtype) for v in _statistics(ctx, x, [1], stash, dtype))
    to_y, to_mean, to_inverse = (*ctx.cotangents, None, None)[:3]
    g = op.Flatten(cast(op, op.full_like(given, 0.0) if to_y is None else to_y, dtype), axis=axis)
    columns = static_size(dims(scale))
    count = op.Cast(op.Size(scale), to=int(dtype)) if columns is None else op.constant(columns, dtype)

    # shift = mean(g s), slope = mean(g s X^) = (mean(g s X) - mean(X) shift) / deviation; both as products with s / n.
    product, column = op.Mul(g, x), op.Reshape(op.Div(scale, count), [-1, 1])
    shift = op.Reshape(op.MatMul(g, column), [-1])
    weighted = op.Reshape(op.MatMul(product, column), [-1])
    slope = op.Mul(op.Sub(weighted, op.Mul(mean, shift)), inverse)
    # `project` divides by the deviation and multiplies `slope` by X^: what d mean / dX = 1 / n and d inverse / dX =
    # -inverse^2 X^ / n add to dX is brought to that form.
    if to_mean is not None:
        part = op.Div(_row(op, to_mean, dtype), count)
        shift = op.Sub(shift, op.Div(part, inverse))
    if to_inverse is not None:
        part = op.Div(_row(op, to_inverse, dtype), count)
        slope = op.Add(slope, op.Mul(part, inverse))
    # The epsilon is in `inverse` already: 1 / inverse^2 is var + epsilon.
    rows = Statistics(mean, op.Reciprocal(op.Mul(inverse, inverse)), 0.0)
    channels = [op.Unsqueeze(v, [0]) for v in (x, op.Mul(g, scale))]
    grad_x = op.reshape_like(project(op, channels[0], channels[1], rows, slope, shift), given)

    # sum over rows of g X^ = sum of inverse (g X) - sum of inverse mean g: two products with a row vector.
    weights = op.Unsqueeze(inverse, [0])
    grad_scale = op.Sub(op.MatMul(weights, product), op.MatMul(op.Mul(weights, op.Unsqueeze(mean, [0])), g))
    grads = [cast(op, grad_x, dtype_of(given)), _reduce_columns(ctx, grad_scale, 1, axis)]
    if ctx.optional(2) is not None:
        grads.append(_reduce_columns(ctx, op.ReduceSum(g, [0], keepdims=1), 2, axis))
    return grads


@forward_rule("", "LayerNormalization")
def push_layer_normalization(ctx: ForwardContext) -> Tangents:
    """dY = s dX^ + ds X^ + dB with dX^ = (dX - mean dX - X^ mean(dX X^)) / deviation, d mean = mean dX and
    d (1 / deviation) = -mean(dX X^) / deviation^2."""
    op, given, n = ctx.op, ctx.input(0), rank(ctx.input(0))
    axis = ctx.attribute("axis", -1) % n
    axes, stash = list(range(axis, n)), ir.DataType(ctx.attribute("stash_type", 1))
    dtype = stash if dtype_of(given) in HALVES else dtype_of(given)
    x, scale = cast(op, given, dtype), cast(op, ctx.input(1), dtype)
    mean, inverse = (cast(op, v, dtype) for v in _statistics(ctx, x, axes, stash, dtype))
    moved = [None if v is None else cast(op, v, dtype) for v in (ctx.tangent(i) for i in range(3))]
    normal, of_mean, of_inverse, total = op.Mul(op.Sub(x, mean), inverse), None, None, None
    if moved[0] is not None:
        shift = op.ReduceMean(moved[0], axes, keepdims=1)
        slope = op.ReduceMean(op.Mul(moved[0], normal), axes, keepdims=1)
        away = op.Mul(op.Sub(op.Sub(moved[0], shift), op.Mul(normal, slope)), inverse)
        of_mean, of_inverse = shift, op.Neg(op.Mul(slope, op.Mul(inverse, inverse)))
        total = op.Mul(away, scale)
    for part in (None if moved[1] is None else op.Mul(normal, moved[1]), moved[2]):
        if part is not None:
            total = op.expand_like(part, x) if total is None else op.Add(total, part)
    results = [None if total is None else cast(op, total, dtype_of(given))]
    return [*results, *(None if v is None else cast(op, v, stash) for v in (of_mean, of_inverse))][: len(ctx.outputs)]


def _statistics(
    ctx: NodeContext, x: ir.Value, axes: Sequence[int], stash: ir.DataType, dtype: ir.DataType
) -> tuple[ir.Value, ir.Value]:
    """Mean and inverse deviation of each row: outputs of the forward node, which are of type `stash`, or computed anew
    from `x` over `axes` where the gradient needs another type."""
    op, epsilon = ctx.op, ctx.attribute("epsilon", EPSILON)
    if stash != dtype:
        mean = op.ReduceMean(x, axes, keepdims=1)
        centered = op.Sub(x, mean)
        var = op.ReduceMean(op.Mul(centered, centered), axes, keepdims=1)
        return mean, op.Reciprocal(op.Sqrt(op.Add(var, epsilon)))
    node = ctx.node
    if len(node.outputs) == 3 and all(value.dtype is not None for value in node.outputs):
        return node.outputs[1], node.outputs[2]
    # The node leaves them out: one that has them takes its place.
    with op.after(node):
        axis = ctx.attribute("axis", -1)
        outputs = op.emit(
            "LayerNormalization", *node.inputs, axis=axis, epsilon=epsilon, stash_type=int(stash), outputs=3
        )
    ctx.replace(*outputs[: len(node.outputs)])
    return outputs[1], outputs[2]


def _columns(ctx: RuleContext, index: int, axis: int, dtype: ir.DataType) -> ir.Value:
    """Scale as [columns]: expanded where it broadcasts. Refuses one that differs between rows."""
    op, x, value = ctx.op, ctx.input(0), cast(ctx.op, ctx.input(index), dtype)
    lead = dims(value)[: max(rank(value) - rank(x) + axis, 0)]
    if any(d != 1 for d in lead):
        ctx.refuse("Scale", f"differs between the rows that are normalized, its shape is {list(dims(value))}")
    normalized = dims(x)[axis:]
    if dims(value)[len(lead) :] != normalized:
        value = op.Expand(value, _target(op, x, axis))
    return op.Reshape(value, [-1])


def _target(op: Builder, x: ir.Value, axis: int) -> list[int] | ir.Value:
    """The sizes of x from an axis on, as a shape operand."""
    normalized = dims(x)[axis:]
    return fixed_sizes(normalized) if is_static(normalized) else op.Shape(x, start=axis)


def _reduce_columns(ctx: RuleContext, row: ir.Value, index: int, axis: int) -> ir.Value:
    """The adjoint of `_columns`, for row [1, columns]."""
    op, x, value = ctx.op, ctx.input(0), ctx.input(index)
    normalized = dims(x)[axis:]
    full = op.Reshape(row, _target(op, x, axis))
    full.shape = ir.Shape(normalized)
    extra = rank(value) - len(normalized)
    if extra > 0:
        full = op.Unsqueeze(full, list(range(extra)))
    return cast(op, op.sum_to(full, value), dtype_of(value))


@rule("", "LpNormalization")
def lp_normalization(ctx: RuleContext) -> Gradients:
    """y = x / norm along one axis, p = 1 or 2: dx = (g - dnorm/dx sum(g y)) / norm (ONNX LpNormalization-1)."""
    op, x, y, g = ctx.op, ctx.input(0), ctx.output, ctx.cotangent
    axes = [ctx.attribute("axis", -1)]
    p = ctx.attribute("p", 2)
    # dnorm/dx is sign x for p = 1, and x / norm = y for p = 2.
    direction = op.Sign(x) if p == 1 else y
    norm = (op.ReduceL1 if p == 1 else op.ReduceL2)(x, axes, keepdims=1)
    return [op.Div(op.Sub(g, op.Mul(direction, op.ReduceSum(op.Mul(g, y), axes, keepdims=1))), norm)]


def _row(op: Builder, statistic: ir.Value, dtype: ir.DataType) -> ir.Value:
    return op.Reshape(cast(op, statistic, dtype), [-1])
