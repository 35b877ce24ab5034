"""Which numbers a graph takes from its integer inputs as indices: token numbers, classes.

On a GPU an index beyond its table ends all of the process's work on the device (a "device-side assert"), so it is
looked for before the inputs go there.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from archipel.graph.model import Model
from archipel.graph.shapes import dims

# What leaves a number the number that it was; and what does so if it is not negative: losses make others large by it.
_SAME = {"Cast", "Expand", "Flatten", "Identity", "Reshape", "Slice", "Squeeze", "Tile", "Transpose", "Unsqueeze"}
_POSITIVE = "BitwiseAnd"
_LOSSES = {"NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss"}


def find_index_limits(model: Model) -> dict[str, range]:
    """For each integer input that is an index as it is: the numbers that are in all of its tables.

    Not found are indices that the graph computes, tables whose size it leaves open, and labels of a loss that ignores
    some.
    """
    found: dict[str, range] = {}
    for value in model.ir.graph.inputs:
        if value.dtype in (ir.DataType.INT64, ir.DataType.INT32):
            limits = _follow(value)
            if limits:
                found[str(value.name)] = range(max(each.start for each in limits), min(each.stop for each in limits))
    return found


def check_indices(name: str, values: Any, limits: range) -> None:
    """Raise IndexError where an array or tensor has a number beyond its limits."""
    if 0 not in values.shape:
        for number in (int(values.min()), int(values.max())):
            if number not in limits:
                raise IndexError(f"{name}: index {number} is out of bounds for dimension 0 with size {limits.stop}")


def _follow(value: ir.Value) -> list[range]:
    limits: list[range] = []
    ahead, seen = [(value, False)], {value}
    while ahead:
        current, positive = ahead.pop()
        for node, index in current.uses():
            if node.domain != "":
                continue
            if (node.op_type in _SAME and index == 0) or node.op_type == _POSITIVE:
                if node.outputs[0] not in seen:
                    seen.add(node.outputs[0])
                    ahead.append((node.outputs[0], positive or node.op_type == _POSITIVE))
            elif (size := _table(node, index)) is not None:
                counts = positive or node.op_type in _LOSSES
                limits.append(range(0 if counts else -size, size))
    return limits


def _table(node: ir.Node, index: int) -> int | None:
    """The number of entries that a node's input chooses from."""
    table = node.inputs[0]
    if index != 1 or table is None or table.shape is None:
        return None
    if node.op_type in ("Gather", "GatherElements", "ScatterElements"):
        axis = node.attributes.get_int("axis", 0)
    elif node.op_type in _LOSSES and "ignore_index" not in node.attributes:
        axis = 1
    else:
        return None
    size = dims(table)[axis]
    return size if isinstance(size, int) else None
