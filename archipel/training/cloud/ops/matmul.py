"""Products of matrices."""

from __future__ import annotations

import torch
from torch.nn import functional

from archipel.training.cloud.ops.context import NodeContext
from archipel.training.cloud.ops.table import lowering


@lowering("MatMul")
def matmul(ctx: NodeContext) -> torch.Tensor:
    return torch.matmul(ctx.tensor(0), ctx.tensor(1))


@lowering("Gemm")
def gemm(ctx: NodeContext) -> torch.Tensor:
    a, b = ctx.tensor(0), ctx.tensor(1)
    alpha, beta = ctx.number("alpha", 1.0), ctx.number("beta", 1.0)
    a = a.t() if ctx.integer("transA", 0) else a
    has_bias = ctx.has(2)
    if ctx.integer("transB", 0) and alpha == 1.0 and (not has_bias or (beta == 1.0 and ctx.rank(2) == 1)):
        return functional.linear(a, b, ctx.tensor(2) if has_bias else None)
    b = b.t() if ctx.integer("transB", 0) else b
    if not has_bias:
        product = torch.mm(a, b)
        return product if alpha == 1.0 else product * alpha
    # addmm has no float factors for integers.
    if ctx.onnx_dtype().is_floating_point():
        return torch.addmm(ctx.tensor(2), a, b, beta=beta, alpha=alpha)
    return torch.mm(a, b) * int(alpha) + ctx.tensor(2) * int(beta)


@lowering("Einsum")
def einsum(ctx: NodeContext) -> torch.Tensor:
    # ONNX's equations are PyTorch's.
    return ctx.call(torch.einsum, ctx.text("equation", ""), *ctx.tensors())  # type: ignore[no-any-return]


@lowering("Det")
def determinant(ctx: NodeContext) -> torch.Tensor:
    return torch.linalg.det(ctx.tensor(0))  # type: ignore[no-any-return]
