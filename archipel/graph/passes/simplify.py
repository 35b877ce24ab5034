"""`simplify`: the passes for a graph whose operators an import has expanded."""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir

from archipel.graph.passes.base import Pipeline
from archipel.graph.passes.constant_folding import FoldConstants
from archipel.graph.passes.dead_code import remove_dead_code
from archipel.graph.passes.reshape_targets import fix_reshape_targets


def simplify(model: ir.Model, keep: Collection[str]) -> None:
    """Fold constants, also shape arithmetic, and remove dead code. Parameters (`keep`) stay. Changes the model."""
    Pipeline(FoldConstants(keep), fix_reshape_targets, remove_dead_code)(model)
