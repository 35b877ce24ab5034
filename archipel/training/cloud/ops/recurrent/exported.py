"""The weights of PyTorch's own layers, where an exporter has put their gates into ONNX's order.

For each direction it writes Unsqueeze(Concat(Slice(weight), ...)), and for biases a Concat of two such. Read directly
they save the slicing, and its gradient, in each step.
"""

from __future__ import annotations

import onnx_ir as ir

from archipel.graph.shapes import constant_array, dims
from archipel.graph.walk import only_use

# ONNX's blocks of gates in PyTorch's order: ONNX has i o f c, z r h and one.
ORDERS = {"LSTM": (0, 2, 3, 1), "GRU": (1, 0, 2), "RNN": (0,)}

Weights = list[list[ir.Value]]
"""For each direction those of the input and of the state, and the biases of both; without biases two of them."""


def find_exported(node: ir.Node) -> tuple[Weights, frozenset[ir.Node]] | None:
    """PyTorch's weights of a recurrent node, and the nodes that only make ONNX's of them; None if it has others."""
    # PyTorch's exporter writes an RNN out in other operators.
    if node.domain or node.op_type not in ("LSTM", "GRU") or not _is_plain(node):
        return None
    search = _Search(ORDERS[node.op_type])
    biased = len(node.inputs) > 3 and node.inputs[3] is not None
    per_input = [search.directions(value, node) for value in node.inputs[1 : 4 if biased else 3]]
    if any(found is None for found in per_input):
        return None
    matrices = [[*each] for each in zip(*(found or [] for found in per_input[:2]))]
    weights: Weights = []
    for d, rows in enumerate(matrices):
        found = [search.blocks(*row) for row in rows]
        if biased:
            bias, reader = (per_input[2] or [])[d]
            pair = search.producer(bias, "Concat", reader)
            if pair is None or len(pair.inputs) != 2:
                return None
            found += [search.blocks(value, pair) for value in pair.inputs]
        if any(value is None for value in found):
            return None
        weights.append([value for value in found if value is not None])
    return weights, frozenset(search.covered)


def _is_plain(node: ir.Node) -> bool:
    """Whether the node is a layer as PyTorch has it, over sequences of one length."""
    if any(value is not None for index, value in enumerate(node.inputs) if index in (4, 7)):
        return False
    if node.op_type == "GRU" and not node.attributes.get_int("linear_before_reset", 0):
        return False
    known = {"hidden_size", "direction", "layout", "linear_before_reset", "input_forget"}
    return set(node.attributes) <= known and not node.attributes.get_int("input_forget", 0)


class _Search:
    def __init__(self, order: tuple[int, ...]) -> None:
        self.order = order
        self.covered: set[ir.Node] = set()

    def producer(self, value: ir.Value | None, op_type: str, reader: ir.Node) -> ir.Node | None:
        """The node of this type that makes `value` for `reader` alone."""
        found = None if value is None else value.producer()
        if (
            found is None
            or value is None
            or found.op_type != op_type
            or found.domain
            or found.graph is not reader.graph
        ):
            return None
        use = only_use(value)
        if use is None or use[0] is not reader:
            return None
        self.covered.add(found)
        return found

    def directions(self, value: ir.Value | None, reader: ir.Node) -> list[tuple[ir.Value, ir.Node]] | None:
        """What was given a first axis of 1, for each direction, with the node that reads it."""
        joined = self.producer(value, "Concat", reader)
        parts, by = ([value], reader) if joined is None else (list(joined.inputs), joined)
        found = []
        for part in parts:
            node = self.producer(part, "Unsqueeze", by)
            axes = None if node is None else constant_array(node.inputs[1])
            if node is None or node.inputs[0] is None or axes is None or axes.tolist() != [0]:
                return None
            found.append((node.inputs[0], node))
        return found

    def blocks(self, value: ir.Value | None, reader: ir.Node) -> ir.Value | None:
        """The value whose blocks, cut along its first axis, `value` has in ONNX's order."""
        joined = self.producer(value, "Concat", reader)
        if joined is None or len(joined.inputs) != len(self.order) or joined.attributes.get_int("axis", 0) != 0:
            return None
        sources = set()
        for place, part in enumerate(joined.inputs):
            cut = self.producer(part, "Slice", joined)
            whole = None if cut is None else cut.inputs[0]
            if cut is None or whole is None or not isinstance(rows := dims(whole)[0], int) or len(cut.inputs) > 5:
                return None
            size, rest = divmod(rows, len(self.order))
            bounds = [constant_array(bound) for bound in cut.inputs[1:]]
            start = size * self.order.index(place)
            expected = [start, start + size, 0, 1][: len(bounds)]
            if (
                rest
                or len(bounds) < 3
                or [None if b is None else b.tolist() for b in bounds] != [[n] for n in expected]
            ):
                return None
            sources.add(whole)
        return sources.pop() if len(sources) == 1 else None
