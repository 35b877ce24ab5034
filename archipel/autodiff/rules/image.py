"""Resampling: Resize is linear in X, so the gradient multiplies by the transposed matrix of each axis."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from archipel.autodiff.context import RuleContext
from archipel.autodiff.registry import Gradients, rule
from archipel.autodiff.rules.interpolation import Interpolation
from archipel.graph.build import Builder
from archipel.graph.shapes import Dim, constant_array, dims, dtype_of, rank

_PROBE = 5  # elements of a trial axis that shows how Resize repeats those of a symbolic one


@rule("", "Resize")
def resize(ctx: RuleContext) -> Gradients:
    """The transposed interpolation matrix of each axis times g (ONNX Resize-19, every mode and attribute).

    Sizes and scales must be fixed; a spatial size may be symbolic if its scale is 1, or in nearest mode a whole number.
    roi, scales and sizes have no gradient.
    """
    op, g, x = ctx.op, ctx.cotangent, ctx.input(0)
    form = _interpolation(ctx)
    repeats: dict[int, int] = {}
    matrices: dict[int, np.ndarray] = {}
    for axis, scale in _scales(ctx).items():
        roi = _roi(ctx, axis, scale) if form.coordinates == "tf_crop_and_resize" else None
        size, length = dims(x)[axis], dims(ctx.output)[axis]
        if not (isinstance(size, int) and isinstance(length, int)):
            repeats[axis] = _symbolic_repeat(ctx, form, axis, size, scale)
            continue
        # A matrix that only repeats elements needs no product: its adjoint adds up neighbours.
        matrix = form.matrix(size, length, scale, roi)
        count = _repeat_count(matrix)
        if count is None:
            matrices[axis] = matrix
        else:
            repeats[axis] = count
    for axis, matrix in matrices.items():
        g = _apply(op, g, axis, matrix)
    return [_sum_repeats(op, g, x, {axis: count for axis, count in repeats.items() if count > 1})]


def _interpolation(ctx: RuleContext) -> Interpolation:
    return Interpolation(
        ctx.attribute("mode", "nearest"),
        ctx.attribute("coordinate_transformation_mode", "half_pixel"),
        ctx.attribute("nearest_mode", "round_prefer_floor"),
        ctx.attribute("cubic_coeff_a", -0.75),
        bool(ctx.attribute("exclude_outside", 0)),
        bool(ctx.attribute("antialias", 0)),
    )


def _axes(ctx: RuleContext) -> list[int]:
    n = rank(ctx.input(0))
    return [axis % n for axis in ctx.attribute("axes", list(range(n)))]


def _scales(ctx: RuleContext) -> dict[int, float]:
    """Axis -> the scale that its coordinates are computed with; from sizes if the node has no scales."""
    axes, shape = _axes(ctx), dims(ctx.input(0))
    scales, sizes = constant_array(ctx.optional(2)), constant_array(ctx.optional(3))
    if scales is not None and scales.size:
        return {axis: float(scale) for axis, scale in zip(axes, scales)}
    if sizes is None:
        ctx.refuse("scales and sizes", "they are computed at run time; make them constants")
    chosen: dict[int, float] = {}
    for axis, length in zip(axes, sizes):
        size = shape[axis]
        if not isinstance(size, int):
            ctx.refuse("sizes", f"axis {axis} must have a fixed size, has {size!r}; give scales instead")
        chosen[axis] = float(length) / size
    policy = ctx.attribute("keep_aspect_ratio_policy", "stretch")
    if policy != "stretch":
        if min(ctx.attribute("axes", [0])) < 0:
            # ONNX Runtime does not apply the policy to negative axes; ONNX does.
            ctx.refuse(f"keep_aspect_ratio_policy={policy}", "with negative axes runtimes disagree; count from 0")
        common = (min if policy == "not_larger" else max)(chosen.values())
        chosen = dict.fromkeys(chosen, common)
    return chosen


def _roi(ctx: RuleContext, axis: int, scale: float) -> tuple[float, float]:
    roi, axes = constant_array(ctx.optional(1)), _axes(ctx)
    if roi is None:
        ctx.refuse("roi", "it is computed at run time; make it a constant")
    place = axes.index(axis)
    start, end = float(roi[place]), float(roi[place + len(axes)])
    if scale == 1.0 and (start, end) != (0.0, 1.0):
        # At scale 1 ONNX crops, while ONNX Runtime copies the axis.
        ctx.refuse("tf_crop_and_resize", f"axis {axis} is cropped at scale 1, where runtimes disagree; use Slice")
    return start, end


def _repeat_count(matrix: np.ndarray) -> int | None:
    """k if the matrix repeats each element k times, else None."""
    length, size = matrix.shape
    if size == 0 or length % size:
        return None
    count = length // size
    return count if np.array_equal(matrix, np.repeat(np.eye(size), count, axis=0)) else None


def _symbolic_repeat(ctx: RuleContext, form: Interpolation, axis: int, size: Dim, scale: float) -> int:
    if scale == 1.0:
        return 1
    if form.mode == "nearest" and form.coordinates != "tf_crop_and_resize" and scale == int(scale):
        # At a whole scale each element is treated like its neighbours, so a few elements show how often it is repeated.
        count = _repeat_count(form.matrix(_PROBE, _PROBE * int(scale), scale))
        if count is not None:
            return count
    ctx.refuse(
        f"mode={form.mode}, {form.coordinates}, scale {scale:g}",
        f"axis {axis} must have a fixed size, has {size!r}",
    )


def _apply(op: Builder, g: ir.Value, axis: int, matrix: np.ndarray) -> ir.Value:
    """The transposed matrix times g along one axis; `matrix` is [length, size], the axis of g has `length` elements."""
    constant, n = matrix.astype(dtype_of(g).numpy()), rank(g)
    if axis == n - 1:
        return op.MatMul(g, constant)
    if axis == n - 2:
        return op.MatMul(np.ascontiguousarray(constant.T), g)
    # An axis further to the front is moved to the end for the product.
    order = [*(i for i in range(n) if i != axis), axis]
    moved = op.MatMul(op.Transpose(g, perm=order), constant)
    return op.Transpose(moved, perm=[order.index(i) for i in range(n)])


def _sum_repeats(op: Builder, g: ir.Value, x: ir.Value, repeats: dict[int, int]) -> ir.Value:
    """Add up the elements that Resize repeated: groups of `repeats[axis]` neighbours."""
    if not repeats:
        return g
    n = rank(x)
    # AveragePool works on spatial axes only; ONNX Runtime's takes up to three.
    if min(repeats) >= 2 and n <= 5:
        kernel = [repeats.get(axis, 1) for axis in range(2, n)]
        mean = op.AveragePool(g, kernel_shape=kernel, strides=kernel)
        result = op.Mul(mean, float(math.prod(kernel)))
    else:
        result = g
        for axis, count in sorted(repeats.items(), reverse=True):
            result = _sum_groups(op, result, axis, count)
    result.shape = x.shape
    return result


def _sum_groups(op: Builder, value: ir.Value, axis: int, count: int) -> ir.Value:
    """Sums of `count` neighbours along `axis`."""
    shape = op.Shape(value)
    parts = [
        op.Slice(shape, [0], [axis], [0]),
        op.constant([-1, count]),
        op.Slice(shape, [axis + 1], [rank(value)], [0]),
    ]
    split = op.Reshape(value, op.Concat(*parts, axis=0))
    total = op.ReduceSum(split, [axis + 1], keepdims=0)
    size = dims(value)[axis]
    total.shape = ir.Shape(
        [*dims(value)[:axis], size // count if isinstance(size, int) else None, *dims(value)[axis + 1 :]]
    )
    return total
