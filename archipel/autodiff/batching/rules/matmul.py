"""Products of matrices: a product for each lane."""

from __future__ import annotations

import onnx_ir as ir

from archipel.autodiff.batching.context import LaneContext
from archipel.autodiff.batching.table import BatchedResults, batch_rule


@batch_rule("MatMul")
def matmul(ctx: LaneContext) -> BatchedResults:
    return [without_added(ctx, ctx.op.MatMul(*sides(ctx)))]


def sides(ctx: LaneContext) -> tuple[ir.Value, ir.Value]:
    """Both sides as matrices, with the axes in front of them aligned. A batched vector becomes a matrix of one row (at
    the left) or column; one that is the same in all lanes stays."""
    op = ctx.op
    ranks = [max(ctx.rank(0), 2), max(ctx.rank(1), 2)]
    found = []
    for index in (0, 1):
        value = ctx.value(index)
        if ctx.rank(index) == 1:
            # A row at the left, a column at the right; the lanes, if there are any, stay in front.
            value = op.Unsqueeze(value, [index + int(ctx.batched(index))])
        missing = max(ranks) - ranks[index]
        if ctx.batched(index) and missing > 0:
            value = op.Unsqueeze(value, list(range(1, missing + 1)))
        found.append(value)
    return found[0], found[1]


def without_added(ctx: LaneContext, product: ir.Value) -> ir.Value:
    """The product without the axes of size 1 that `sides` added to vectors."""
    added = [axis for axis, index in ((-2, 0), (-1, 1)) if ctx.rank(index) == 1]
    return ctx.op.Squeeze(product, added) if added else product


@batch_rule("MatMulInteger")
def matmul_integer(ctx: LaneContext) -> BatchedResults:
    # Zero points of a row or column have no axis for the lanes.
    if ctx.batched(2, 3) or any(ctx.has(i) and ctx.rank(i) > 0 for i in (2, 3)):
        return []
    points = [ctx.value(i) if ctx.has(i) else None for i in (2, 3)]
    return [without_added(ctx, ctx.op.MatMulInteger(*sides(ctx), *points))]


@batch_rule("QLinearMatMul")
def quantized_matmul(ctx: LaneContext) -> BatchedResults:
    # Only the left side has lanes, and all scales and zero points are single numbers.
    others = range(1, len(ctx.node.inputs))
    single = all(ctx.rank(i) == 0 or ctx.dims(i) == (1,) for i in others if i != 3)
    if ctx.batched(*others) or not single or ctx.rank(0) < 2 or ctx.rank(3) != 2:
        return []
    return ctx.same(*ctx.values())


@batch_rule("Gemm")
def gemm(ctx: LaneContext) -> BatchedResults:
    op = ctx.op
    alpha, beta = float(ctx.attribute("alpha", 1.0)), float(ctx.attribute("beta", 1.0))
    flips = [bool(ctx.attribute("transA", 0)), bool(ctx.attribute("transB", 0))]
    bias = 2 if ctx.has(2) else None
    # One product of all lanes' rows, if only they differ.
    same_rows = bias is None or (ctx.rank(bias) < 2 or ctx.dims(bias)[0] == 1)
    if not ctx.batched(1, 2) and not flips[0] and same_rows:
        return [ctx.part(ctx.same(ctx.join(0), *ctx.values()[1:])[0], ctx.size(0, 0))]
    left, right = (op.swap_last(ctx.value(i)) if flips[i] else ctx.value(i) for i in (0, 1))
    value = op.MatMul(left, right)
    if alpha != 1.0:
        value = op.Mul(value, alpha)
    if bias is not None:
        term = ctx.aligned(bias, 2)
        value = op.Add(value, term if beta == 1.0 else op.Mul(term, beta))
    return [value]
