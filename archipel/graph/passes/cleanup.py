"""Passes that drop what is not needed. Each changes the model it is given."""

from __future__ import annotations

import onnx_ir as ir
import onnx_ir.passes.common as common


def remove_dead_code(model: ir.Model) -> None:
    """Drop nodes and initializers that no output needs."""
    common.RemoveUnusedNodesPass()(model)


def share_subexpressions(model: ir.Model) -> None:
    """Compute equal things once. Names of graph outputs stay."""
    common.CommonSubexpressionEliminationPass()(model)
