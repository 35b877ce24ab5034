"""Rewriting by rules of onnxscript."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import onnx_ir as ir
import onnx_ir.passes.common as common

from archipel.graph.passes.base import GraphPass

_UNUSED: tuple[type[ir.passes.PassBase], ...] = (
    common.RemoveUnusedNodesPass,
    common.RemoveUnusedFunctionsPass,
    common.RemoveUnusedOpsetsPass,
)


@cache
def cancelling_rules() -> Sequence[Any]:
    """The rules of onnxscript about operators that undo each other or change nothing."""
    from onnxscript.rewriter.rules import common as rules

    return (
        rules.cast_cast_rule,
        rules.no_op_cast_rule,
        rules.transpose_transpose_rule,
        rules.no_op_transpose_rule,
        rules.no_op_expand_rule,
        rules.reshape_reshape_rule,
        *rules.mul_by_1_rule.commute(),
        rules.div_by_1_rule,
    )


class ApplyRules(GraphPass):
    """Rewrite by rules of onnxscript, and drop the nodes, functions and opset imports that are unused after that.

    `rules` is a function that returns them, called with the first model: importing onnxscript's rewriter takes a while.
    """

    def __init__(self, rules: Callable[[], Sequence[Any]]) -> None:
        self._rules = rules

    def change(self, model: ir.Model) -> bool:
        from onnxscript.rewriter import RewritePass

        # As onnxscript's `rewrite`, which does not return whether it changed anything.
        return ir.passes.PassManager([RewritePass(self._rules()), *(each() for each in _UNUSED)])(model).modified
