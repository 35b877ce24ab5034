"""Operators that draw random numbers."""

from __future__ import annotations

import onnx_ir as ir

from archipel.autodiff.context import RuleContext
from archipel.autodiff.registry import Gradients, rule
from archipel.autodiff.rules.normalization import cast
from archipel.graph.shapes import constant_array, dtype_of


@rule("", "Dropout")
def dropout(ctx: RuleContext) -> Gradients:
    """y = mask x / (1 - ratio) in training: dx = mask g / (1 - ratio); else y = x (ONNX Dropout-13).

    The mask is the node's own second output: the random numbers cannot be drawn again. The gradient of `ratio` holds
    the mask fixed: sum(g x mask) / (1 - ratio)^2. `ratio` and `training_mode` may be computed at run time.
    """
    op, g, data, ratio, mode = ctx.op, ctx.cotangent, ctx.input(0), ctx.optional(1), ctx.optional(2)
    training = constant_array(mode)
    if mode is None or (training is not None and not training.any()):
        return [g, None if ratio is None else op.full_like(ratio, 0.0)]
    dtype = dtype_of(data)
    keep = op.Cast(_mask(ctx), to=int(dtype))
    kept = op.Sub(1.0, cast(op, op.constant(0.5, dtype) if ratio is None else ratio, dtype))
    if training is None:
        kept = op.Where(mode, kept, op.constant(1.0, dtype))
    grad_data = op.Div(op.Mul(g, keep), kept)
    grad_ratio = None
    if ratio is not None and ctx.wants(1):
        total = op.Div(op.ReduceSum(op.Mul(grad_data, data), keepdims=0), kept)
        if training is None:
            total = op.Where(mode, total, op.constant(0.0, dtype))
        grad_ratio = op.reshape_like(cast(op, total, dtype_of(ratio)), ratio)
    return [grad_data, grad_ratio]


def _mask(ctx: RuleContext) -> ir.Value:
    """The node's mask output; a node that leaves it out is replaced by one that has it."""
    if len(ctx.outputs) > 1 and ctx.outputs[1].dtype is not None:
        return ctx.outputs[1]
    with ctx.op.after(ctx.node):
        y, mask = ctx.op.emit("Dropout", *ctx.inputs, seed=ctx.attribute("seed", None), outputs=2)
    ctx.replace(*[y, mask][: len(ctx.outputs)])
    return mask
