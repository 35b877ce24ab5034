"""Sums of zero-padded parts that are a concatenation."""

from __future__ import annotations

import onnx_ir as ir

from archipel.graph.build import Builder
from archipel.graph.passes.base import LevelPass
from archipel.graph.passes.replacement import take_over
from archipel.graph.shapes import constant_array, dims
from archipel.graph.walk import only_reader


class ConcatenatePads(LevelPass):
    """A sum of zero-padded parts that lie side by side along one axis becomes their Concat.

    The gradient of a tensor that is read in slices is such a sum: gates of a recurrent layer, heads of attention.
    """

    def change_level(self, op: Builder) -> bool:
        modified = False
        for node in list(op.graph):
            if node.op_type != "Add" or node.domain != "":
                continue
            reader = only_reader(node.outputs[0])
            if reader is not None and reader.op_type == "Add" and _parts(reader.outputs[0]) is not None:
                continue  # part of a longer sum, which its last Add represents
            parts = _parts(node.outputs[0])
            placed = None if parts is None else _place(parts)
            if placed is None:
                continue
            axis, pieces = placed
            with op.after(node):
                result = op.Concat(*pieces, axis=axis)
            take_over(op, node.outputs[0], result)
            modified = True
        return modified


concatenate_pads = ConcatenatePads()


def _parts(value: ir.Value) -> list[ir.Node] | None:
    """The Pads whose sum `value` is; None if anything else is in it, or another node reads a part of the sum."""
    parts: list[ir.Node] = []
    waiting = [value]  # not a recursion: a sum may have thousands of parts
    while waiting:
        part = waiting.pop()
        node = part.producer()
        if node is None or node.domain != "" or (part is not value and only_reader(part) is None):
            return None
        if node.op_type == "Pad":
            parts.append(node)
        elif node.op_type == "Add" and node.inputs[0] is not None and node.inputs[1] is not None:
            waiting += [node.inputs[0], node.inputs[1]]
        else:
            return None
    return parts


def _place(pads: list[ir.Node]) -> tuple[int, list[ir.Value]] | None:
    """The axis along which the padded parts lie side by side without gaps, and the parts in order; None if none."""
    spans: dict[int, tuple[int, ir.Value]] = {}
    common: int | None = None
    for node in pads:
        amounts = constant_array(node.inputs[1])
        mode = node.attributes.get("mode")
        # Padding with another value, with `axes` or in another mode adds more than zeros around the part.
        if len(node.inputs) > 2 or amounts is None or (mode is not None and mode.value != "constant"):
            return None
        inner, rank = node.inputs[0], len(amounts) // 2
        padded = [axis for axis in range(rank) if amounts[axis] or amounts[axis + rank]]
        if inner is None or len(padded) != 1 or (common is not None and padded[0] != common) or (amounts < 0).any():
            return None
        common = padded[0]
        start = int(amounts[common])
        if start in spans:
            return None
        spans[start] = (int(amounts[common + rank]), inner)
    if common is None:
        return None
    # Each part has to start where the one before it ends, and the last one to have no padding behind.
    position, pieces = 0, []
    for start in sorted(spans):
        size = dims(spans[start][1])[common]
        if start != position or not isinstance(size, int):
            return None
        pieces.append(spans[start][1])
        position += size
    return (common, pieces) if spans[max(spans)][0] == 0 else None
