"""What runs over a graph after differentiation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import onnx_ir as ir

from archipel.graph.build import Builder
from archipel.graph.passes.accumulate import accumulate_in_gemm, concatenate_pads
from archipel.graph.passes.cleanup import remove_dead_code, remove_identities, share_subexpressions
from archipel.graph.passes.scalars import lift_scalars
from archipel.graph.passes.zeros import remove_zeros

PASSES: tuple[Callable[[Builder], None], ...] = (remove_zeros, concatenate_pads, accumulate_in_gemm, lift_scalars)


def optimize(model: ir.Model) -> None:
    """Drop what differentiation leaves behind and use the fused forms that ONNX Runtime runs faster.

    Dead code, casts and transposes that cancel, products with one, common subexpressions, additions of zero, sums that
    a Gemm or a Concat takes over, scalars beside tensors of many small rows. What feeds the chosen formulations (such
    as tiled identity kernels) stays as it is.
    """
    remove_dead_code(model)
    _rewrite(model)
    share_subexpressions(model)
    for change in PASSES:
        for op in _levels(model):
            change(op)
        remove_dead_code(model)


def _levels(model: ir.Model) -> Iterator[Builder]:
    root = Builder(model.graph)
    yield root
    for graph in model.graph.subgraphs():
        yield Builder(graph, outer=root)


def _rewrite(model: ir.Model) -> None:
    from onnxscript.rewriter import rewrite

    rewrite(model, pattern_rewrite_rules=_rules())
    remove_identities(model)


@cache
def _rules() -> Any:
    from onnxscript.rewriter.rules import common as rules

    return [
        rules.cast_cast_rule,
        rules.no_op_cast_rule,
        rules.transpose_transpose_rule,
        rules.no_op_transpose_rule,
        rules.no_op_expand_rule,
        rules.reshape_reshape_rule,
        *rules.mul_by_1_rule.commute(),
        rules.div_by_1_rule,
    ]
