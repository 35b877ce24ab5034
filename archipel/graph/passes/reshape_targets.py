"""Constant targets for Reshape nodes whose output shape is known."""

from __future__ import annotations

import numpy as np

from archipel.graph.build import Builder
from archipel.graph.passes.base import LevelPass
from archipel.graph.shapes import constant_array, dims


class FixReshapeTargets(LevelPass):
    """Give each Reshape with at most one symbolic output dimension a constant target, with -1 for that dimension."""

    def change_level(self, op: Builder) -> bool:
        modified = False
        for node in list(op.graph):
            if node.op_type != "Reshape" or node.domain != "" or constant_array(node.inputs[1]) is not None:
                continue
            if node.outputs[0].shape is None:
                continue
            shape = dims(node.outputs[0])
            symbolic = sum(not isinstance(d, int) for d in shape)
            if symbolic > 1 or 0 in shape:  # 0 in a target would mean "as in the input"
                continue
            target = np.array([d if isinstance(d, int) else -1 for d in shape], np.int64)
            node.replace_input_with(1, op.constant(target))
            node.attributes.pop("allowzero", None)
            modified = True
        return modified


fix_reshape_targets = FixReshapeTargets()
