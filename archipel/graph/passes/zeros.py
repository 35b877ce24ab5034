"""Additions of nothing and products with nothing, as differentiation leaves them behind."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from archipel.graph.build import Builder
from archipel.graph.passes.base import LevelPass
from archipel.graph.shapes import constant_array, dims, is_float, same_shape

# Operators that make zeros of a zero input 0, whatever their other inputs (shapes, axes) are.
_KEEP_ZERO = frozenset(
    {"Identity", "Neg", "Cast", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Expand", "Tile", "Slice"}
    | {"Gather", "ReduceSum", "ReduceMean"}
)


class RemoveZeros(LevelPass):
    """x + 0 and x - 0 become x, 0 - x becomes -x, where shapes are known to be equal.

    Zeros are zero constants and what is made of them, products too: a zero times infinity or NaN counts as zero,
    for the zeros are those that autodiff wrote for "no influence".
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
                fill = node.attributes.get("value")
                found = fill is None or not np.any(fill.as_tensor().numpy())
            elif node.op_type in _KEEP_ZERO or node.op_type == "Div":
                found = empty[0]
            elif node.op_type in ("Mul", "MatMul"):
                found = any(empty)
            elif node.op_type in ("Add", "Sub"):
                found = all(empty)
                if not found and any(empty) and not output.is_graph_output():
                    modified |= _drop(op, node, empty)
            else:
                found = False
            if found:
                zeros.add(output)
        return modified


remove_zeros = RemoveZeros()


def _drop(op: Builder, node: ir.Node, empty: list[bool]) -> bool:
    kept, output = node.inputs[0 if empty[1] else 1], node.outputs[0]
    if kept is None or not same_shape(dims(kept), dims(output)):
        return False
    if node.op_type == "Sub" and empty[0]:
        with op.after(node):
            kept = op.Neg(kept)
    output.replace_all_uses_with(kept)
    return True


def _is_zero(value: ir.Value) -> bool:
    array = constant_array(value)
    return array is not None and not np.any(array)
