"""Matrix products: Y = A B has dA = G B^T and dB = A^T G, with G the cotangent of Y."""

from __future__ import annotations

import onnx_ir as ir

from archipel.autodiff.context import RuleContext
from archipel.autodiff.registry import Gradients, rule
from archipel.graph.shapes import dims, rank


@rule("", "MatMul")
def matmul(ctx: RuleContext) -> Gradients:
    """Of matrices, stacks of matrices that broadcast, and vectors (ONNX MatMul-13, numpy.matmul)."""
    op, g, a, b = ctx.op, ctx.cotangent, ctx.input(0), ctx.input(1)
    # ONNX treats a vector as a row on the left and as a column on the right, and drops that axis from the result.
    # With the axis put back everywhere, also in g, there are only matrices.
    left = op.Unsqueeze(a, [0]) if rank(a) == 1 else a
    right = op.Unsqueeze(b, [1]) if rank(b) == 1 else b
    if rank(b) == 1:
        g = op.Unsqueeze(g, [-1])
    if rank(a) == 1:
        g = op.Unsqueeze(g, [-2])
    grad_a = grad_b = None
    if ctx.wants(0):
        grad_a = op.reshape_like(op.sum_to(op.MatMul(g, op.swap_last(right)), left), a)
    if ctx.wants(1):
        grad_b = op.reshape_like(_right_gradient(ctx, left, right, g), b)
    return [grad_a, grad_b]


def _right_gradient(ctx: RuleContext, left: ir.Value, right: ir.Value, g: ir.Value) -> ir.Value:
    op = ctx.op
    if rank(right) == 2 and rank(left) > 2:
        # A weight shared by the whole batch: one product over all rows sums over the batch by itself. Otherwise
        # a product for each batch element would be kept in memory, then summed.
        k, n = dims(right)
        if isinstance(k, int) and isinstance(n, int) and k > 0 and n > 0:
            rows, grads = op.Reshape(left, [-1, k]), op.Reshape(g, [-1, n])
            return op.MatMul(op.swap_last(rows), grads)
    return op.sum_to(op.MatMul(op.swap_last(left), g), right)


@rule("", "Gemm")
def gemm(ctx: RuleContext) -> Gradients:
    """Y = alpha * A' * B' + beta * C, with A' = transpose(A) if transA (ONNX Gemm-13)."""
    op, g, a, b = ctx.op, ctx.cotangent, ctx.input(0), ctx.input(1)
    alpha, beta = ctx.attribute("alpha", 1.0), ctx.attribute("beta", 1.0)
    trans_a, trans_b = ctx.attribute("transA", 0), ctx.attribute("transB", 0)
    grad_a = grad_b = grad_c = None
    # With A' and B' possibly transposed: dA' = alpha G B'^T, and dA is its transpose if transA. Transposing a whole
    # product swaps its factors, so each case is one Gemm again and no Transpose is emitted.
    if ctx.wants(0):
        grad_a = (
            op.Gemm(b, g, alpha=alpha, transA=trans_b, transB=1)
            if trans_a
            else op.Gemm(g, b, alpha=alpha, transB=1 - trans_b)
        )
    if ctx.wants(1):
        grad_b = (
            op.Gemm(g, a, alpha=alpha, transA=1, transB=trans_a)
            if trans_b
            else op.Gemm(a, g, alpha=alpha, transA=1 - trans_a)
        )
    if ctx.wants(2):
        grad_c = op.sum_to(g, ctx.input(2))
        if beta != 1.0:
            grad_c = op.Mul(grad_c, float(beta))
    return [grad_a, grad_b, grad_c]
