"""Initial states of recurrent layers that are zeros."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from archipel.graph.passes.base import GraphPass
from archipel.graph.shapes import constant_array

_STATES: Mapping[str, tuple[int, ...]] = {"LSTM": (5, 6), "GRU": (5,), "RNN": (5,)}
_KEEP_ZERO = frozenset({"Expand", "Reshape", "Squeeze", "Unsqueeze", "Transpose", "Slice", "Identity", "Cast", "Tile"})


class DropZeroStates(GraphPass):
    """Leave out initial states that are zeros, from which the operators start by default.

    Exporters compute them from the batch's size, with half a dozen nodes for each.
    """

    def change(self, model: ir.Model) -> bool:
        modified = False
        for node in model.graph.all_nodes():
            for place in _STATES.get(node.op_type, ()) if node.domain == "" else ():
                if place < len(node.inputs) and _is_zero(node.inputs[place]):
                    node.replace_input_with(place, None)
                    modified = True
        return modified


drop_zero_states = DropZeroStates()


def _is_zero(value: ir.Value | None) -> bool:
    if value is None:
        return False
    content = constant_array(value)
    if content is not None:
        return not content.any()
    node = value.producer()
    if node is None or node.domain != "":
        return False
    # Zeros of the batch's size: a ConstantOfShape, then nodes that rearrange or repeat its elements.
    if node.op_type == "ConstantOfShape":
        fill = node.attributes.get("value")
        return fill is None or not fill.as_tensor().numpy().any()
    return node.op_type in _KEEP_ZERO and _is_zero(node.inputs[0])
