"""Activation functions."""

from __future__ import annotations

import onnx_ir as ir

from archipel.autodiff.context import RuleContext
from archipel.autodiff.registry import Gradients, rule
from archipel.graph.shapes import dtype_of


@rule("", "Relu")
def relu(ctx: RuleContext) -> Gradients:
    """The derivative at 0 is 0, as in PyTorch."""
    op, y = ctx.op, ctx.output
    # Float -> bool -> float is the fastest 0/1 mask on ONNX Runtime: faster than Sign, much faster than Where.
    mask = op.Cast(op.Cast(y, to=int(ir.DataType.BOOL)), to=int(dtype_of(y)))
    return [op.Mul(ctx.cotangent, mask)]
