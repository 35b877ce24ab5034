"""What runs over a graph that only predicts."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import cache
from typing import Any

import onnx_ir as ir

from archipel.graph.passes.affine import fold_affine
from archipel.graph.passes.averages import use_global_average
from archipel.graph.passes.cleanup import remove_dead_code, remove_identities, share_subexpressions
from archipel.graph.passes.constants import UNPACK, hidden
from archipel.graph.passes.no_ops import remove_no_ops
from archipel.graph.passes.products import use_gemm
from archipel.graph.passes.recurrent_states import drop_zero_states
from archipel.graph.passes.shape_arithmetic import fold_shapes
from archipel.graph.passes.simplify import fold_constants
from archipel.graph.passes.transposes import simplify_transposes
from archipel.graph.passes.unit_height import add_unit_height

PASSES: tuple[Callable[[ir.Model], None], ...] = (
    remove_no_ops,
    drop_zero_states,
    simplify_transposes,
    fold_affine,
    use_gemm,
    use_global_average,
    add_unit_height,
)


def optimize_for_inference(model: ir.Model, keep: Collection[str]) -> None:
    """Make `model` quicker to run, smaller and simpler. Changes it; inputs, outputs and their names stay.

    Initializers in `keep`, its parameters, stay what they are, whatever they contain: what changes them is written as
    nodes that read them. Functions must have been inlined.
    """
    with hidden(model.graph, keep):
        _simplify(model, keep)
        for change in PASSES:
            change(model)
            remove_dead_code(model)
        _simplify(model, keep)


def _simplify(model: ir.Model, keep: Collection[str]) -> None:
    from onnxscript.rewriter import rewrite

    fold_constants(model, keep, preserved=_is_unpacking)
    fold_shapes(model)
    rewrite(model, pattern_rewrite_rules=_rules())
    remove_no_ops(model)
    remove_identities(model)
    share_subexpressions(model)
    remove_dead_code(model)


def _is_unpacking(node: ir.Node) -> bool:
    return UNPACK in node.metadata_props


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
        rules.unsqueeze_unsqueeze_rule,
        *rules.mul_by_1_rule.commute(),
        rules.div_by_1_rule,
        *rules.add_0_rule.commute(),
        rules.sub_0_rule,
        rules.successive_relu_rule,
        rules.successive_clip_rule,
        rules.successive_clip_relu_rule,
        rules.successive_relu_clip_rule,
        rules.fuse_pad_into_conv_rule,
    ]
