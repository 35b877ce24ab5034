"""What is computed twice."""

from __future__ import annotations

import onnx_ir as ir
import onnx_ir.passes.common as common

from archipel.graph.passes.base import GraphPass
from archipel.graph.walk import levels


class ShareSubexpressions(GraphPass):
    """Compute equal things once, in each graph and body by itself. Names of graph outputs stay."""

    def change(self, model: ir.Model) -> bool:
        modified = False
        for graph in levels(model.graph):
            # The pass looks at the main graph of the model that it is given, and at nothing else of it.
            alone = ir.Model(graph, ir_version=model.ir_version)
            modified |= common.CommonSubexpressionEliminationPass()(alone).modified
        return modified


share_subexpressions = ShareSubexpressions()
