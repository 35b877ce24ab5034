"""Values that the way back computes once more, and does not keep from the way forward.

`checkpoint` marks nodes of a model as segments, in their metadata. When reverse mode comes to a segment, it emits the
segment's nodes a second time and differentiates these twins, so that nothing of the way back reads what the segment
computed first, except for the values that other nodes read as well: those are kept (Chen et al., Training Deep Nets
with Sublinear Memory Cost, 2016).

Two things would undo that. A runtime merges nodes that compute the same from the same values, and it may run the twins
at once, beside the first ones. Both end if the twins read something that depends on the cotangent of what the segment
computes: each value that they start from goes through a Reshape to its own shape, plus a number that is always 0, that
is computed from the cotangent. A Reshape copies nothing, and no runtime can know the number before the run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import onnx_ir as ir

from archipel.autodiff.activity import reads_content
from archipel.graph.bodies import copy_node
from archipel.graph.build import Builder
from archipel.graph.shapes import dims, dtype_of
from archipel.graph.walk import dependencies

SEGMENT = "archipel.recompute"
"""Metadata key of a node: the segment that it belongs to. The way back computes segments once more."""

NOTHING = "archipel.nothing"
"""Metadata key of a node whose result is 0, whatever it reads: others only wait for it."""

_COMPARED = frozenset(
    {"Min", "Max", "Clip", "ReduceMin", "ReduceMax", "MaxPool", "GlobalMaxPool", "ScatterElements", "ScatterND"}
)


def is_compared(value: ir.Value) -> bool:
    """Whether its maker's gradient looks for it, bit by bit, among what the way back computes again.

    That may differ in the last bit, as ONNX Runtime's sums do with the place in memory. So it is computed again, too.
    """
    node = value.producer()
    if node is not None and node.op_type == "Identity" and node.inputs[0] is not None:
        return is_compared(node.inputs[0])
    return node is not None and node.op_type in _COMPARED


def segment_of(node: ir.Node) -> str | None:
    """The segment that the node belongs to; None: its results are kept."""
    return node.metadata_props.get(SEGMENT)


def kept_values(nodes: Iterable[ir.Node]) -> set[ir.Value]:
    """Results of segments whose content other nodes read, or that are outputs of the graph."""
    nodes = list(nodes)
    read_elsewhere = {
        value
        for node in nodes
        if reads_content(node)
        for value in dependencies(node)
        if (maker := value.producer()) is not None and segment_of(maker) != segment_of(node)
    }
    return {
        value
        for node in nodes
        if segment_of(node) is not None
        for value in node.outputs
        if value in read_elsewhere or value.is_graph_output()
    }


class Twins:
    """The second computation of segments, emitted where reverse mode first comes to one of their nodes."""

    def __init__(self, op: Builder, nodes: Sequence[ir.Node]) -> None:
        self._op = op
        self._segments: dict[str, list[ir.Node]] = {}
        for node in nodes:
            if (segment := segment_of(node)) is not None:
                self._segments.setdefault(segment, []).append(node)
        self._kept = kept_values(nodes) if self._segments else set()
        self._twins: dict[ir.Node, ir.Node] = {}
        self._awaited: set[ir.Value] = set()

    def of(self, node: ir.Node, before: Sequence[ir.Value]) -> ir.Node:
        """The twin of a node of a segment, computed after the floats in `before`; other nodes themselves.

        These are the cotangents that the segment's gradient begins with, and all gradients of the segments behind it,
        so that what they need is free by then.
        """
        segment = segment_of(node)
        if segment not in self._segments:
            return node
        if node not in self._twins:
            with self._op.scope(f"{segment}.again"):
                # None is new behind a segment that passes its cotangent on as it is, such as an addition.
                fresh = [each for each in before if each not in self._awaited]
                self._emit(self._segments[segment], fresh or before)
            self._awaited.update(before)
        return self._twins[node]

    def finish(self) -> None:
        """Let the gradients read kept values instead of the twins' own, which then need not be computed."""
        for node, twin in self._twins.items():
            for value, again in zip(node.outputs, twin.outputs):
                if value in self._kept and not again.is_graph_output() and not is_compared(value):
                    again.replace_all_uses_with(value)

    def _emit(self, nodes: Sequence[ir.Node], before: Sequence[ir.Value]) -> None:
        late = _Late(self._op, before)
        twin_of: dict[ir.Value, ir.Value] = {}
        twins_own: set[ir.Value] = set()
        for node in nodes:
            twin = copy_node(self._op, node, twin_of)
            self._twins[node] = twin
            if not twins_own.intersection(dependencies(twin)):
                late.delay(twin)
            twins_own.update(twin.outputs)
            for value, again in zip(node.outputs, twin.outputs):
                if value not in self._kept:
                    twin_of[value] = again


class _Late:
    """Values that are the same as before, but known only after others."""

    def __init__(self, op: Builder, before: Sequence[ir.Value]) -> None:
        self._op = op
        self._before = before
        self._zero: ir.Value | None = None
        self._late: dict[ir.Value, ir.Value] = {}

    def delay(self, node: ir.Node) -> None:
        """Make the node read one of its inputs late: a computed one if there is one, rather than a weight."""
        inputs = [(index, value) for index, value in enumerate(node.inputs) if value is not None]
        computed = [(i, v) for i, v in inputs if v.producer() is not None]
        given = [(i, v) for i, v in inputs if not v.is_initializer()]
        for index, value in (computed or given or inputs)[:1]:
            node.replace_input_with(index, self._after(value, node))

    def _after(self, value: ir.Value, node: ir.Node) -> ir.Value:
        op = self._op
        if value not in self._late:
            with op.before(node):
                late = op.Reshape(value, op.Add(op.shape_of(value), self._number()), allowzero=1)
            late.shape = ir.Shape(list(dims(value)))
            self._late[value] = late
        return self._late[value]

    def _number(self) -> ir.Value:
        """int64 [1], 0: how many of the values' first elements are less than themselves, which no number is."""
        if self._zero is None:
            op = self._op
            dtype = dtype_of(self._before[0])
            firsts = [op.Slice(op.Reshape(value, [-1]), [0], [1], [0]) for value in self._before]
            firsts = [first if dtype_of(first) == dtype else op.Cast(first, to=int(dtype)) for first in firsts]
            first = firsts[0] if len(firsts) == 1 else op.Concat(*firsts, axis=0)
            less = op.Cast(op.Less(first, first), to=int(ir.DataType.INT64))
            self._zero = op.ReduceSum(less, keepdims=1)
            node = self._zero.producer()
            if node is not None:
                node.metadata_props[NOTHING] = ""
        return self._zero
