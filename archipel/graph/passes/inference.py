"""`optimize_for_inference`: the passes for a graph that only predicts."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import cache
from typing import Any

import onnx_ir as ir

from archipel.graph.passes.affine import fold_affine
from archipel.graph.passes.averages import use_global_average
from archipel.graph.passes.base import GraphPass, InlinedPipeline
from archipel.graph.passes.constant_folding import FoldConstants
from archipel.graph.passes.constants import hide_contents
from archipel.graph.passes.dead_code import remove_dead_code
from archipel.graph.passes.hoisting import hoist_constants
from archipel.graph.passes.identities import remove_identities
from archipel.graph.passes.no_ops import remove_no_ops
from archipel.graph.passes.products import use_gemm
from archipel.graph.passes.rewriting import ApplyRules, cancelling_rules
from archipel.graph.passes.shape_arithmetic import fold_shapes
from archipel.graph.passes.subexpressions import share_subexpressions
from archipel.graph.passes.transposes import simplify_transposes
from archipel.graph.passes.unit_height import add_unit_height
from archipel.graph.passes.zeros import drop_zero_states

PASSES: tuple[GraphPass, ...] = (
    remove_no_ops,
    drop_zero_states,
    simplify_transposes,
    fold_affine,
    use_gemm,
    use_global_average,
    add_unit_height,
)


def optimize_for_inference(model: ir.Model, keep: Collection[str]) -> None:
    """Make `model` faster and smaller. Changes it; inputs, outputs and their names stay.

    Arguments:
        model: a model whose functions have been inlined.
        keep: names of initializers, its parameters, that must stay as they are. Passes do not use their content; they
            emit nodes that read them, so the graph stays right when the content changes.

    Raises onnx_ir's PreconditionError for a model with functions.
    """
    # Dead code goes after each pass: a dead reader would make a value look as if two nodes read it.
    changes = [step for change in PASSES for step in (change, remove_dead_code)]
    with hide_contents(model.graph, keep):
        InlinedPipeline(*_simplification(keep), *changes, *_simplification(keep))(model)


def _simplification(keep: Collection[str]) -> Iterable[GraphPass]:
    yield FoldConstants(keep)
    yield hoist_constants
    yield fold_shapes
    yield ApplyRules(_rules)
    yield remove_no_ops
    yield remove_identities
    yield share_subexpressions
    yield remove_dead_code


@cache
def _rules() -> Any:
    from onnxscript.rewriter.rules import common as rules

    return [
        *cancelling_rules(),
        rules.unsqueeze_unsqueeze_rule,
        *rules.add_0_rule.commute(),
        rules.sub_0_rule,
        rules.successive_relu_rule,
        rules.successive_clip_rule,
        rules.successive_clip_relu_rule,
        rules.successive_relu_clip_rule,
        rules.fuse_pad_into_conv_rule,
    ]
