"""Reading at indices, whose adjoint adds at the same indices, and writing at indices, whose adjoint reads there."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from archipel.autodiff.context import RuleContext
from archipel.autodiff.registry import Gradients, rule
from archipel.autodiff.rules.join import embed, int64, zeros
from archipel.graph.build import Builder
from archipel.graph.shapes import constant_array, dims, dtype_of, is_static, rank


@rule("", "Gather")
def gather(ctx: RuleContext) -> Gradients:
    """ddata is 0, with each row of g added at the index that it was read from; any axis, indices of any rank (ONNX
    Gather-13).

    ScatterND adds whole rows along axis 0, up to 7 times faster than ScatterElements; another axis is moved to the
    front for that. For one fixed index the gradient is g with zeros around it.
    """
    op, g, data, indices = ctx.op, ctx.cotangent, ctx.input(0), ctx.input(1)
    axis, n, lead = ctx.attribute("axis", 0) % rank(data), rank(data), rank(indices)
    known = constant_array(indices)
    if known is not None and known.size == 1:
        return [_place_at_one(op, g, data, axis, int(known.item()))]
    rows = op.Unsqueeze(int64(op, indices), [-1])
    if axis == 0:
        return [op.ScatterND(op.full_like(data, 0.0), rows, g, reduction="add")]
    # `order` brings the axis to the front; in g the `lead` axes of the indices are in its place.
    order = [axis, *range(axis), *range(axis + 1, n)]
    shape = dims(data)
    first = op.Transpose(g, perm=[*range(axis, axis + lead), *range(axis), *range(axis + lead, rank(g))])
    moved = [shape[i] for i in order]
    target = op.constant(np.array(moved, np.int64)) if is_static(moved) else op.Gather(op.Shape(data), order)
    base = zeros(op, target, data)
    base.shape = ir.Shape(moved)
    total = op.ScatterND(base, rows, first, reduction="add")
    return [op.Transpose(total, perm=[order.index(i) for i in range(n)])]


def _place_at_one(op: Builder, g: ir.Value, data: ir.Value, axis: int, index: int) -> ir.Value:
    """The cotangent at one position of an axis, zeros elsewhere."""
    size = dims(data)[axis]
    # The indices have `lead` axes, all of size 1; with exactly one axis in their place g fits the data.
    lead = rank(g) - rank(data) + 1
    if lead == 0:
        g = op.Unsqueeze(g, [axis])
    elif lead > 1:
        g = op.Squeeze(g, list(range(axis, axis + lead - 1)))
    if index < 0 and isinstance(size, int):
        index += size
    before = [index] if index >= 0 else op.Add(op.Shape(data, start=axis, end=axis + 1), [index])
    return embed(op, g, data, [axis], before)


@rule("", "GatherElements")
def gather_elements(ctx: RuleContext) -> Gradients:
    """ddata is 0, with each element of g added at its index (ONNX GatherElements-13)."""
    op, indices, axis = ctx.op, ctx.input(1), ctx.attribute("axis", 0)
    return [op.ScatterElements(op.full_like(ctx.input(0), 0.0), indices, ctx.cotangent, axis=axis, reduction="add")]


@rule("", "GatherND")
def gather_nd(ctx: RuleContext) -> Gradients:
    """ddata is 0, with each slice of g added at its index (ONNX GatherND-13).

    ScatterND has no batch_dims, so the position on each batch axis is put in front of the index.
    """
    op, data, indices = ctx.op, ctx.input(0), ctx.input(1)
    batch, n = ctx.attribute("batch_dims", 0), rank(indices)
    if batch:
        column, places = op.Slice(indices, [0], [1], [n - 1]), []
        for axis in range(batch):
            count = op.Range(0, op.Squeeze(op.Shape(data, start=axis, end=axis + 1)), 1)
            along = op.Reshape(count, [-1 if i == axis else 1 for i in range(n)])
            places.append(op.expand_like(along, column))
        indices = op.Concat(*places, indices, axis=n - 1)
    return [op.ScatterND(op.full_like(data, 0.0), indices, ctx.cotangent, reduction="add")]


Read = Callable[[ir.Value], ir.Value]
Write = Callable[[ir.Value, ir.Value, str], ir.Value]


@rule("", "ScatterElements")
def scatter_elements(ctx: RuleContext) -> Gradients:
    op, indices, axis = ctx.op, ctx.input(1), ctx.attribute("axis", 0)
    return _scatter(
        ctx,
        lambda source: op.GatherElements(source, indices, axis=axis),
        lambda base, updates, how: op.ScatterElements(base, indices, updates, axis=axis, reduction=how),
    )


@rule("", "ScatterND")
def scatter_nd(ctx: RuleContext) -> Gradients:
    op, indices = ctx.op, ctx.input(1)

    def read(source: ir.Value) -> ir.Value:
        elements = op.GatherND(source, indices)
        elements.shape = ctx.input(2).shape
        return elements

    return _scatter(ctx, read, lambda base, updates, how: op.ScatterND(base, indices, updates, reduction=how))


def _scatter(ctx: RuleContext, read: Read, write: Write) -> Gradients:
    """Gradients of data and updates; `read` gathers at the indices, `write` is the operator itself (ONNX
    ScatterElements-18, ScatterND-18).

    Of n values that share a maximum or minimum each gets 1 / n of its gradient, as in PyTorch. Without a reduction ONNX
    does not define which of several updates of one element counts.
    """
    op, g, data, updates = ctx.op, ctx.cotangent, ctx.input(0), ctx.input(2)
    how = ctx.attribute("reduction", "none")
    grad_data = grad_updates = None
    if how == "add":
        return [g, None, read(g) if ctx.wants(2) else None]
    if how == "none":
        if ctx.wants(0):  # elements that were overwritten have no influence
            grad_data = write(g, op.full_like(updates, 0.0), "none")
        return [grad_data, None, read(g) if ctx.wants(2) else None]
    dtype = int(dtype_of(data))
    if how == "mul":
        if ctx.wants(0):
            grad_data = write(g, updates, "mul")
        if ctx.wants(2):
            # d element / d update is the product of its other factors. To never divide by 0: the whole product, with 1
            # for each update that is 0, divided by this update (or that 1), and 0 if another update is 0.
            zero = op.Equal(updates, 0.0)
            nonzero = op.Where(zero, op.constant(1.0, data.dtype), updates)
            one = op.Cast(zero, to=dtype)
            others = op.Sub(read(write(op.full_like(data, 0.0), one, "add")), one)
            product = op.Div(read(op.Mul(g, write(data, nonzero, "mul"))), nonzero)
            grad_updates = op.Mul(product, op.Cast(op.Equal(others, 0.0), to=dtype))
        return [grad_data, None, grad_updates]
    # max and min: 1 for each value that is equal to the result, over how many there are.
    kept = op.Cast(op.Equal(data, ctx.output), to=dtype)
    taken = op.Cast(op.Equal(updates, read(ctx.output)), to=dtype)
    share = op.Div(g, write(kept, taken, "add"))
    return [op.Mul(share, kept), None, op.Mul(read(share), taken)]


@rule("", "TopK")
def top_k(ctx: RuleContext) -> Gradients:
    """The cotangent of each value goes to the index that it came from, which is the second output (ONNX TopK-11)."""
    base = ctx.op.full_like(ctx.input(0), 0.0)
    return [ctx.op.ScatterElements(base, ctx.outputs[1], ctx.cotangent, axis=ctx.attribute("axis", -1))]


@rule("", "ReverseSequence")
def reverse_sequence(ctx: RuleContext) -> Gradients:
    """The same again: what it moves to a place it moves back from there (ONNX ReverseSequence-10)."""
    axes = {name: ctx.attribute(name, default) for name, default in (("batch_axis", 1), ("time_axis", 0))}
    return [ctx.op.ReverseSequence(ctx.cotangent, ctx.input(1), **axes)]
