"""Zeros that need not be there: added, multiplied with, or the initial states of recurrent layers."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from archipel.graph.build import Builder
from archipel.graph.passes.base import GraphPass, LevelPass
from archipel.graph.shapes import constant_array, dims, is_float, same_shape

# Operators whose result is all zeros if input 0 is, whatever their other inputs (shapes, axes) are.
_KEEP_ZERO = frozenset(
    {"Identity", "Neg", "Cast", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Expand", "Tile", "Slice"}
    | {"Gather", "ReduceSum", "ReduceMean"}
)


class RemoveZeros(LevelPass):
    """x + 0 and x - 0 become x, 0 - x becomes -x, where the shapes are certainly equal.

    Zeros are zero constants and values computed from them, products too. Zero times infinity or NaN counts as zero:
    autodiff emits zeros for "no influence", which stays none whatever the other factor is.
    """

    def change_level(self, op: Builder) -> bool:
        zeros: set[ir.Value] = set()
        modified = False
        for node in list(op.graph):
            if node.domain != "" or len(node.outputs) != 1 or not is_float(node.outputs[0]):
                continue
            output = node.outputs[0]
            empty = [value is not None and (value in zeros or _is_zero(value)) for value in node.inputs]
            if node.op_type == "ConstantOfShape":
                is_zero = _fills_with_zeros(node)
            elif node.op_type in _KEEP_ZERO or node.op_type == "Div":
                is_zero = empty[0]
            elif node.op_type in ("Mul", "MatMul"):
                is_zero = any(empty)
            elif node.op_type in ("Add", "Sub"):
                # A graph output keeps its Add: the value that replaces it would have to take its name.
                is_zero = all(empty)
                if not is_zero and any(empty) and not output.is_graph_output():
                    modified |= _drop(op, node, empty)
            else:
                is_zero = False
            if is_zero:
                zeros.add(output)
        return modified


remove_zeros = RemoveZeros()


def _drop(op: Builder, node: ir.Node, empty: list[bool]) -> bool:
    # Zeros of a larger shape broadcast the other operand, so they do something.
    kept, output = node.inputs[0 if empty[1] else 1], node.outputs[0]
    if kept is None or not same_shape(dims(kept), dims(output)):
        return False
    if node.op_type == "Sub" and empty[0]:
        with op.after(node):
            kept = op.Neg(kept)
    output.replace_all_uses_with(kept)
    return True


_STATES: Mapping[str, tuple[int, ...]] = {"LSTM": (5, 6), "GRU": (5,), "RNN": (5,)}


class DropZeroStates(GraphPass):
    """Leave out initial states that are zeros, from which the operators start by default.

    Exporters compute them from the batch's size, with half a dozen nodes for each.
    """

    def change(self, model: ir.Model) -> bool:
        modified = False
        for node in model.graph.all_nodes():
            for place in _STATES.get(node.op_type, ()) if node.domain == "" else ():
                if place < len(node.inputs) and _starts_from_zeros(node.inputs[place]):
                    node.replace_input_with(place, None)
                    modified = True
        return modified


drop_zero_states = DropZeroStates()


def _starts_from_zeros(value: ir.Value | None) -> bool:
    """Whether the value is zeros of the batch's size: filled with them, then rearranged or repeated."""
    if value is None:
        return False
    if _is_zero(value):
        return True
    node = value.producer()
    if node is None or node.domain != "":
        return False
    if node.op_type == "ConstantOfShape":
        return _fills_with_zeros(node)
    return node.op_type in _KEEP_ZERO and _starts_from_zeros(node.inputs[0])


def _fills_with_zeros(node: ir.Node) -> bool:
    fill = node.attributes.get("value")
    return fill is None or not np.any(fill.as_tensor().numpy())


def _is_zero(value: ir.Value) -> bool:
    array = constant_array(value)
    return array is not None and not np.any(array)
