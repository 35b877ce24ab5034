"""Forward mode of operators that are linear in their inputs, or in each of several: the operator itself, of tangents.

Their transposed rules give the same by way of the adjoint and its adjoint, which may cost more: the adjoint of
broadcasting sums over axes that are known at run time only, and that of a convolution unfolds its input.
"""

from __future__ import annotations

import onnx_ir as ir

from archipel.autodiff.context import ForwardContext
from archipel.autodiff.registry import Tangents, forward_rule
from archipel.graph.build import Operand
from archipel.graph.shapes import dims, rank, same_shape


@forward_rule(
    "", "Neg", "Identity", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Expand", "Tile", "Trilu"
)
@forward_rule("", "ReduceSum", "ReduceMean", "CumSum", "Slice", "Split", "Gather", "GatherElements", "GatherND")
@forward_rule("", "GlobalAveragePool", "AveragePool", "DepthToSpace", "SpaceToDepth")
def linear(ctx: ForwardContext) -> Tangents:
    """Linear in the first input; the others are sizes, axes and places."""
    return _again(ctx, ctx.tangent(0), *ctx.inputs[1:])


@forward_rule("", "Concat", "Sum", "Mean")
def jointly_linear(ctx: ForwardContext) -> Tangents:
    """Linear in all inputs together: those that do not move have zeros."""
    parts = [
        ctx.op.full_like(value, 0.0) if tangent is None and value is not None else tangent
        for value, tangent in zip(ctx.inputs, ctx.tangents)
    ]
    return _again(ctx, *parts)


@forward_rule("", "Add", "Sub")
def difference(ctx: ForwardContext) -> Tangents:
    left, right = ctx.tangent(0), ctx.tangent(1)
    if left is not None and right is not None:
        return _again(ctx, left, right)
    if left is None:
        left = right if right is None or ctx.node.op_type == "Add" else ctx.op.Neg(right)
    return [None if left is None else ctx.op.expand_like(left, ctx.output)]


@forward_rule("", "MatMul", "Mul", "Einsum")
def product(ctx: ForwardContext) -> Tangents:
    """Linear in each input: one term for each, in which its tangent takes its place."""
    total: ir.Value | None = None
    for place, tangent in enumerate(ctx.tangents):
        if tangent is not None:
            before, after = ctx.inputs[:place], ctx.inputs[place + 1 :]
            if ctx.node.op_type == "Mul":  # the tangent first: the two terms of a square are one then
                before, after = (), before + after
            (part,) = _again(ctx, *before, tangent, *after)
            total = part if total is None else ctx.op.Add(total, part)
    return [total]


@forward_rule("", "Conv", "ConvTranspose", "Gemm")
def affine_product(ctx: ForwardContext) -> Tangents:
    """Linear in each of the first two inputs, with a bias: its tangent is the bias of the first term."""
    bias, total = ctx.tangent(2), None
    for place in (0, 1):
        tangent = ctx.tangent(place)
        if tangent is not None:
            factors = [tangent if i == place else ctx.input(i) for i in (0, 1)]
            (part,) = _again(ctx, *factors, bias if total is None else None)
            total = part if total is None else ctx.op.Add(total, part)
    return [_bias(ctx, bias) if total is None and bias is not None else total]


def _bias(ctx: ForwardContext, bias: ir.Value) -> ir.Value:
    """The tangent where only the bias moves."""
    op, y = ctx.op, ctx.output
    if ctx.node.op_type == "Gemm":
        return op.expand_like(op.Mul(bias, float(ctx.attribute("beta", 1.0))), y)
    return op.expand_like(op.Unsqueeze(bias, list(range(1, rank(y) - 1))), y)


@forward_rule("", "Div")
def quotient(ctx: ForwardContext) -> Tangents:
    """d (a / b) = (da - y db) / b."""
    op, b, over, under = ctx.op, ctx.input(1), ctx.tangent(0), ctx.tangent(1)
    if under is None:
        return [None if over is None else op.Div(over, b)]
    loss = op.Mul(ctx.output, under)
    return [op.Div(op.Neg(loss) if over is None else op.Sub(over, loss), b)]


def _again(ctx: ForwardContext, *inputs: Operand) -> list[ir.Value]:
    """The node's operator, with its attributes, of these inputs."""
    given = {name: attribute.value for name, attribute in ctx.node.attributes.items()}
    results = list(ctx.op.emit(ctx.node.op_type, *inputs, outputs=len(ctx.outputs), **given))
    for result, y in zip(results, ctx.outputs):
        if y.shape is not None and (result.shape is None or not same_shape(dims(result), dims(y))):
            result.shape = y.shape
    return results
