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
            _give_loops_a_condition(model)
            removed = [node for node in with_bodies if node.graph is None]
            if not removed:
                return changed
            # What a removed loop or branch captures would count as used forever.
            for node in removed:
                for inner in (inner for body in bodies(node) for inner in body.all_nodes()):
                    for index in range(len(inner.inputs)):
                        inner.replace_input_with(index, None)


remove_dead_code = RemoveDeadCode()


def _give_loops_a_condition(model: ir.Model) -> None:
    """onnx_ir's pass drops trailing inputs that are left out, but a Loop has two at least: trip count and condition."""
    for node in model.graph.all_nodes():
        if node.op_type == "Loop" and node.domain == "" and len(node.inputs) < 2:
            node.resize_inputs(2)
