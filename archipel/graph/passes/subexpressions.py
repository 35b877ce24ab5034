"""Common subexpressions."""

from __future__ import annotations

import onnx_ir as ir
import onnx_ir.passes.common as common

from archipel.graph.passes.base import GraphPass
from archipel.graph.walk import levels


class ShareSubexpressions(GraphPass):
    """Compute equal expressions once, in the main graph and in each body on its own. Names of graph outputs stay."""

    def change(self, model: ir.Model) -> bool:
        modified = False
        for graph in levels(model.graph):
            # onnx_ir's pass changes only the main graph of a model, so each body is made one for a moment.
            alone = ir.Model(graph, ir_version=model.ir_version)
            modified |= common.CommonSubexpressionEliminationPass()(alone).modified
        return modified


share_subexpressions = ShareSubexpressions()
