"""Moving, repeating and casting elements: the gradient moves back, is summed over repeats, is cast back."""

from __future__ import annotations

import onnx_ir as ir

from archipel.autodiff.context import RuleContext
from archipel.autodiff.registry import Gradients, rule
from archipel.graph.shapes import constant_array, dims, dtype_of, rank


@rule("", "Identity")
def identity(ctx: RuleContext) -> Gradients:
    return [ctx.cotangent]


@rule("", "Cast")
def cast(ctx: RuleContext) -> Gradients:
    x = ctx.input(0)
    if dtype_of(x) == dtype_of(ctx.output):
        return [ctx.cotangent]
    return [ctx.op.Cast(ctx.cotangent, to=int(dtype_of(x)))]


@rule("", "Reshape", "Flatten", "Squeeze", "Unsqueeze")
def reshape(ctx: RuleContext) -> Gradients:
    return [ctx.op.reshape_like(ctx.cotangent, ctx.input(0))]


@rule("", "Transpose")
def transpose(ctx: RuleContext) -> Gradients:
    """By the inverse permutation."""
    n = rank(ctx.input(0))
    perm = ctx.attribute("perm", list(reversed(range(n))))
    return [ctx.op.Transpose(ctx.cotangent, perm=[perm.index(axis) for axis in range(n)])]


@rule("", "Expand")
def expand(ctx: RuleContext) -> Gradients:
    """Summed over the repeated axes."""
    return [ctx.op.sum_to(ctx.cotangent, ctx.input(0))]


@rule("", "Tile")
def tile(ctx: RuleContext) -> Gradients:
    """Split each repeated axis of g into [repeats, size] and sum over the repeats (ONNX Tile-13)."""
    op, g, x, repeats = ctx.op, ctx.cotangent, ctx.input(0), ctx.input(1)
    known, sizes = constant_array(repeats), [size if isinstance(size, int) else -1 for size in dims(x)]
    apart: list[int] | ir.Value
    # A constant shape may have one -1 for an unknown size, but no 0 beside it, which would leave -1 undetermined.
    if known is not None and sizes.count(-1) <= (0 not in [*sizes, *known]):
        repeated = [axis for axis, count in enumerate(known) if count != 1]
        apart = [n for axis, size in enumerate(sizes) for n in ([int(known[axis])] * (axis in repeated) + [size])]
    else:
        repeated = list(range(len(sizes)))
        apart = op.Reshape(op.Concat(op.Unsqueeze(repeats, [1]), op.Unsqueeze(op.Shape(x), [1]), axis=1), [-1])
    if not repeated:
        return [g]
    # The axis of repeats comes before the one it was split from, and moves those after it up by one.
    axes = [axis + before for before, axis in enumerate(repeated)]
    return [op.ReduceSum(op.Reshape(g, apart, allowzero=1), axes, keepdims=0)]


@rule("", "DepthToSpace")
def depth_to_space(ctx: RuleContext) -> Gradients:
    """The inverse: SpaceToDepth, which puts the positions in a block before the channels, as mode DCR does.

    Mode CRD has the channels before the positions, so its channels are reordered (ONNX DepthToSpace-13).
    """
    op, x, block = ctx.op, ctx.input(0), ctx.attribute("blocksize", 1)
    result = op.SpaceToDepth(ctx.cotangent, blocksize=block)
    if ctx.attribute("mode", "DCR") == "CRD":
        channels = dims(x)[1]
        count = channels if isinstance(channels, int) else op.Squeeze(op.Shape(x, start=1, end=2))
        # Channel numbers in the order DCR, [positions, channels / positions], read column by column: the order CRD.
        slow = op.Reshape(op.Range(0, count, 1), [block * block, -1])
        result = op.Gather(result, op.Reshape(op.Transpose(slow, perm=[1, 0]), [-1]), axis=1)
    return [result]


@rule("", "SpaceToDepth")
def space_to_depth(ctx: RuleContext) -> Gradients:
    """The inverse (ONNX SpaceToDepth-13)."""
    return [ctx.op.DepthToSpace(ctx.cotangent, blocksize=ctx.attribute("blocksize", 1), mode="DCR")]
