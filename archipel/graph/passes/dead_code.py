"""Removal of dead code."""

from __future__ import annotations

import onnx_ir as ir
import onnx_ir.passes.common as common

from archipel.graph.passes.base import GraphPass


class RemoveDeadCode(GraphPass):
    """Drop nodes and initializers that no output needs."""

    def change(self, model: ir.Model) -> bool:
        return common.RemoveUnusedNodesPass()(model).modified


remove_dead_code = RemoveDeadCode()
