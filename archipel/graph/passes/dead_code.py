"""Removal of dead code."""

from __future__ import annotations

import onnx_ir as ir
import onnx_ir.passes.common as common

from archipel.graph.passes.base import GraphPass
from archipel.graph.walk import bodies


class RemoveDeadCode(GraphPass):
    """Drop nodes and initializers that no output needs."""

    def change(self, model: ir.Model) -> bool:
        changed = False
        while True:
            with_bodies = [node for node in model.graph.all_nodes() if bodies(node)]
            changed |= common.RemoveUnusedNodesPass()(model).modified
            removed = [node for node in with_bodies if node.graph is None]
            if not removed:
                return changed
            # What a removed loop or branch captures would count as used forever.
            for node in removed:
                for inner in (inner for body in bodies(node) for inner in body.all_nodes()):
                    for index in range(len(inner.inputs)):
                        inner.replace_input_with(index, None)


remove_dead_code = RemoveDeadCode()
