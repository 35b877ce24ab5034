"""A maximum for loops that only their condition ends."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from archipel.errors import GraphError
from archipel.graph.build import Builder
from archipel.graph.sizes import Sizes
from archipel.graph.walk import levels


def limit_loops(model: ir.Model, iterations: int) -> int:
    """Let each Loop without a bound (`Sizes.iterations`), those in bodies too, stop after so many iterations.

    Changes `model`. Returns how many loops it has changed. Raises GraphError for a number below 1.
    """
    if isinstance(iterations, bool) or not isinstance(iterations, int) or iterations < 1:
        raise GraphError(f"limit_loops: iterations is {iterations!r}; give a whole number of 1 or more")
    sizes, main = Sizes(model, 1), Builder(model.graph, scope="limit")
    changed = 0
    for level in levels(model.graph):
        op = main if level is model.graph else Builder(level, "limit", outer=main)
        for node in list(level):
            if node.op_type != "Loop" or node.domain != "" or _is_bounded(node, sizes):
                continue
            count, most = node.inputs[0], np.array(iterations, np.int64)
            with op.before(node):
                bound = op.constant(most) if count is None else op.Min(count, most)
            node.replace_input_with(0, bound)
            changed += 1
    return changed


def _is_bounded(node: ir.Node, sizes: Sizes) -> bool:
    try:
        sizes.iterations(node)
    except GraphError:
        return False
    return True
