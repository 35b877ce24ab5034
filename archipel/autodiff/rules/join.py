"""Concatenating, splitting, slicing and padding: the adjoint of one is another."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from archipel.autodiff.context import RuleContext
from archipel.autodiff.registry import Gradients, rule
from archipel.graph.build import Builder
from archipel.graph.shapes import constant_array, dims, dtype_of, is_static, rank, static_size

# Bounds of a Slice that ONNX clamps to before the first element and behind the last.
_BEFORE_FIRST, _END = int(np.iinfo(np.int64).min), int(np.iinfo(np.int64).max)


@rule("", "Concat")
def concat(ctx: RuleContext) -> Gradients:
    """g is split into the inputs' parts (ONNX Concat-13)."""
    op, g = ctx.op, ctx.cotangent
    parts = [ctx.input(i) for i in range(len(ctx.inputs))]
    if len(parts) == 1:
        return [g]
    axis = ctx.attribute("axis", 0) % rank(g)
    sizes = [size for part in parts if isinstance(size := dims(part)[axis], int)]
    wanted = [i for i in range(len(parts)) if ctx.wants(i)]
    if len(sizes) < len(parts) or len(wanted) > 1:
        every = sizes if len(sizes) == len(parts) else op.Concat(*(_sizes(op, x, [axis]) for x in parts), axis=0)
        gradients = list(op.emit("Split", g, every, axis=axis, outputs=len(parts)))
        for part, gradient in zip(parts, gradients):
            gradient.shape = part.shape
        return gradients
    # One gradient at a known place: a Slice does not copy the other parts.
    start = sum(sizes[: wanted[0]])
    only = op.Slice(g, [start], [start + sizes[wanted[0]]], [axis])
    return [only if i == wanted[0] else None for i in range(len(parts))]


@rule("", "Split")
def split(ctx: RuleContext) -> Gradients:
    """The cotangents of the parts, concatenated; zeros for parts without one (ONNX Split-18)."""
    op, x, axis = ctx.op, ctx.input(0), ctx.attribute("axis", 0)
    if len(ctx.outputs) == 1:
        return [ctx.cotangent]
    for y in ctx.outputs:
        if y.shape is None:  # inference gives no shape where sizes are computed, or for an output that is left out
            y.shape = ir.Shape([None if i == axis % rank(x) else size for i, size in enumerate(dims(x))])
            y.dtype = dtype_of(x)
    parts = [op.full_like(y, 0.0) if g is None else g for y, g in zip(ctx.outputs, ctx.cotangents)]
    return [op.Concat(*parts, axis=axis)]


@rule("", "Slice")
def slice_(ctx: RuleContext) -> Gradients:
    """g with zeros around it, and between its elements where a step is not 1 (ONNX Slice-13).

    Where steps or axes are computed, the same Slice of the elements' positions says where to add g.
    """
    op, g, x = ctx.op, ctx.cotangent, ctx.input(0)
    axes, steps = _axes_and_steps(ctx)
    starts, ends = constant_array(ctx.input(1)), constant_array(ctx.input(2))
    if axes is not None and steps is not None:
        # Fixed bounds and sizes give the positions here, else the graph computes where they start.
        if starts is not None and ends is not None:
            bounds = zip([dims(x)[axis] for axis in axes], starts.tolist(), ends.tolist(), steps)
            spans = [_span(size, start, end, step) for size, start, end, step in bounds if isinstance(size, int)]
            if len(spans) == len(axes):
                return [_place(op, g, x, axes, spans)]
        return [_place_at_runtime(op, g, x, ctx.input(1), axes, steps)]
    read = op.Slice(_positions(op, x), *ctx.inputs[1:])
    return [_add_at(op, x, read, g)]


@rule("", "Pad")
def pad(ctx: RuleContext) -> Gradients:
    """Modes constant (padding may be negative), reflect, edge and wrap (ONNX Pad-21)."""
    op, g, x, pads = ctx.op, ctx.cotangent, ctx.input(0), ctx.input(1)
    value, axes, mode = ctx.optional(2), ctx.optional(3), ctx.attribute("mode", "constant")
    grad_x = grad_value = None
    if ctx.wants(0) and mode == "constant":
        known = constant_array(pads)
        if known is not None and min(known, default=0) >= 0:
            # Twice as fast as a Pad with negative amounts.
            before, after = np.split(known, 2)
            ends = np.where(after == 0, _END, -after)
            grad_x = op.Slice(g, before, ends, axes if axes is None else int64(op, axes))
        else:
            grad_x = op.Pad(g, op.Neg(pads) if known is None else -known, None, axes)
        grad_x.shape = x.shape
    elif ctx.wants(0):
        # reflect, edge and wrap repeat elements: the same Pad of the elements' positions says where to add g.
        grad_x = _add_at(op, x, op.Pad(_positions(op, x), pads, None, axes, mode=mode), g)
    if value is not None and ctx.wants(2):
        if mode == "constant":
            # 1 on the padding and 0 inside: the padded value gets the sum of g on the padding.
            around = op.Pad(op.full_like(x, 0.0), pads, op.constant(1.0, x.dtype), axes)
            around.shape = g.shape
            grad_value = op.reshape_like(op.ReduceSum(op.Mul(g, around), keepdims=0), value)
        else:
            grad_value = op.full_like(value, 0.0)
    return [grad_x, None, grad_value]


def embed(
    op: Builder, value: ir.Value, like: ir.Value, axes: Sequence[int], before: Sequence[int] | ir.Value
) -> ir.Value:
    """Zeros of the shape of `like`, with `value` from position `before` on along `axes`; what lies outside is cut."""
    have, want = [dims(value)[axis] for axis in axes], [dims(like)[axis] for axis in axes]
    n = rank(like)
    # Pad takes the amounts before each axis, then those after each.
    places = [*(axis % n for axis in axes), *(n + axis % n for axis in axes)]
    if isinstance(before, ir.Value) or not is_static([*have, *want]):
        first = before if isinstance(before, ir.Value) else op.constant(np.array(before, np.int64))
        size, kept = _sizes(op, like, axes), _sizes(op, value, axes)
        amounts = op.Concat(first, op.Sub(op.Sub(size, first), kept), axis=0)
        pads = op.ScatterElements(op.constant(np.zeros(2 * n, np.int64)), places, amounts, axis=0)
    else:
        after = [w - b - h for w, b, h in zip(want, before, have)]  # type: ignore[operator]
        if not any(before) and not any(after):
            return value
        padding = np.zeros(2 * n, np.int64)
        padding[places] = [*before, *after]
        pads = op.constant(padding)
    # Pads for all axes, not for `axes` only: ONNX Runtime moves a Transpose across a Pad as if it had no input `axes`.
    result = op.Pad(value, pads)
    result.shape = like.shape
    return result


def zeros(op: Builder, shape: ir.Value, like: ir.Value) -> ir.Value:
    """Zeros of the type of `like`; `shape` is int64 [rank]."""
    return op.ConstantOfShape(shape, value=ir.tensor(np.zeros(1, dtype_of(like).numpy())))


def int64(op: Builder, indices: ir.Value) -> ir.Value:
    """Indices as int64, the one type that every operator takes."""
    if indices.dtype == ir.DataType.INT64:
        return indices
    return op.Cast(indices, to=int(ir.DataType.INT64))


def _axes_and_steps(ctx: RuleContext) -> tuple[list[int] | None, list[int] | None]:
    """The axes, none negative, and the steps of a Slice node; None for either if it is computed at run time."""
    n, count = rank(ctx.input(0)), dims(ctx.input(1))[0]
    settings: list[list[int] | None] = []
    for index, default in ((3, list(range(n))), (4, [1] * n)):
        content = constant_array(ctx.optional(index))
        if content is not None:
            settings.append(content.tolist())
        elif ctx.optional(index) is None and isinstance(count, int):
            settings.append(default[:count])
        else:
            settings.append(None)
    axes, steps = settings
    return None if axes is None else [axis % n for axis in axes], steps


def _span(size: int, start: int, end: int, step: int) -> range:
    """The positions that are read, with the clamping of ONNX Slice-13."""
    start, end = (bound + size if bound < 0 else bound for bound in (start, end))
    if step > 0:
        return range(min(max(start, 0), size), min(max(end, 0), size), step)
    return range(min(max(start, 0), size - 1), min(max(end, -1), size - 1), step)


def _place(op: Builder, g: ir.Value, x: ir.Value, axes: list[int], spans: list[range]) -> ir.Value:
    """Zeros of the shape of `x`, with the cotangent of what a Slice read at `spans` along `axes`."""
    if not all(spans):
        return op.full_like(x, 0.0)
    # A negative step is a positive one read backwards; a step above 1 leaves gaps that `_space` fills with zeros.
    g = _reverse(op, g, [axis for axis, span in zip(axes, spans) if span.step < 0 and len(span) > 1])
    for axis, span in zip(axes, spans):
        if abs(span.step) > 1 and len(span) > 1:
            g = _space(op, g, axis, abs(span.step))
    return embed(op, g, x, axes, [min(span[0], span[-1]) for span in spans])


def _place_at_runtime(
    op: Builder, g: ir.Value, x: ir.Value, starts: ir.Value, axes: list[int], steps: list[int]
) -> ir.Value:
    """As `_place`, where sizes or bounds are known at run time only: the clamping of `_span`, in the graph."""
    size, kept = _sizes(op, x, axes), _sizes(op, g, axes)
    start = int64(op, starts)
    start = op.Where(op.Less(start, 0), op.Add(start, size), start)
    # Clamped to [0, size] for a positive step and to [0, size - 1] for a negative one.
    start = op.Max(op.Min(start, op.Sub(size, np.array([int(step < 0) for step in steps], np.int64))), 0)
    # A slice that runs backwards has read its lowest position last, `kept - 1` steps below its start.
    first = op.Add(start, op.Mul(np.array([max(-step, 0) for step in steps], np.int64), op.Sub(1, kept)))
    g = _reverse(op, g, [axis for axis, step in zip(axes, steps) if step < 0])
    for axis, step in zip(axes, steps):
        if abs(step) > 1:
            g = _space(op, g, axis, abs(step))
    return embed(op, g, x, axes, op.Min(first, size))


def _reverse(op: Builder, value: ir.Value, axes: list[int]) -> ir.Value:
    if not axes:
        return value
    n = len(axes)
    result = op.Slice(value, [-1] * n, [_BEFORE_FIRST] * n, axes, [-1] * n)
    result.shape = value.shape
    return result


def _space(op: Builder, value: ir.Value, axis: int, step: int) -> ir.Value:
    """`step - 1` zeros after each element along `axis`. A Concat with zeros: up to 10 times faster than Pad or Mul."""
    items = op.Unsqueeze(value, [axis + 1])
    # [.., n, 1, ..] beside zeros [.., n, step - 1, ..], then both axes as one of n * step.
    gaps = zeros(op, _multiplied(op, items, axis + 1, step - 1), value)
    shape, size = dims(value), dims(value)[axis]
    result = op.Reshape(op.Concat(items, gaps, axis=axis + 1), _multiplied(op, value, axis, step), allowzero=1)
    result.shape = ir.Shape([*shape[:axis], size * step if isinstance(size, int) else None, *shape[axis + 1 :]])
    return result


def _multiplied(op: Builder, value: ir.Value, axis: int, factor: int) -> ir.Value:
    """The shape of `value`, int64, with the size of `axis` times `factor`."""
    shape, factors = dims(value), [factor if i == axis else 1 for i in range(rank(value))]
    if is_static(shape):
        return op.constant(np.multiply(shape, factors))  # type: ignore[arg-type]
    return op.Mul(op.Shape(value), factors)


def _positions(op: Builder, x: ir.Value) -> ir.Value:
    """Each element's position in the flattened `x`, int64, in the shape of `x`."""
    size = static_size(dims(x))
    positions = op.Reshape(op.Range(0, op.Size(x) if size is None else size, 1), op.shape_of(x), allowzero=1)
    positions.shape = x.shape
    return positions


def _add_at(op: Builder, x: ir.Value, positions: ir.Value, g: ir.Value) -> ir.Value:
    """Zeros of the shape of `x`, with `g` added at `positions` in the flattened `x`, of the same shape as `g`."""
    base, at, values = (op.Reshape(value, [-1]) for value in (op.full_like(x, 0.0), positions, g))
    total = op.ScatterElements(base, at, values, axis=0, reduction="add")
    return op.reshape_like(total, x)


def _sizes(op: Builder, value: ir.Value, axes: Sequence[int]) -> ir.Value:
    """The sizes of these axes, int64 [len(axes)]."""
    sizes = [dims(value)[axis] for axis in axes]
    if is_static(sizes):
        return op.constant(np.array(sizes, np.int64))
    return op.Gather(op.Shape(value), list(axes))
