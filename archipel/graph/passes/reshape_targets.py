"""Targets of Reshape that are computed although they are known."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from archipel.graph.build import Builder
from archipel.graph.passes.base import GraphPass
from archipel.graph.shapes import constant_array, dims


class FixReshapeTargets(GraphPass):
    """Give Reshape a constant target, -1 for the one symbolic dimension, where its output shape is known that far."""

    def change(self, model: ir.Model) -> bool:
        op = Builder(model.graph)
        modified = False
        for node in list(model.graph):
            if node.op_type != "Reshape" or node.domain != "" or constant_array(node.inputs[1]) is not None:
                continue
            if node.outputs[0].shape is None:
                continue
            shape = dims(node.outputs[0])
            symbolic = sum(not isinstance(d, int) for d in shape)
            if symbolic > 1 or 0 in shape:
                continue
            target = np.array([d if isinstance(d, int) else -1 for d in shape], np.int64)
            node.replace_input_with(1, op.constant(target))
            node.attributes.pop("allowzero", None)
            modified = True
        return modified


fix_reshape_targets = FixReshapeTargets()
