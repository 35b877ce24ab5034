"""Which indices of every axis stay when channels go, and the constants that hold sizes and must change with them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from archipel.compression.prune.links import Links
from archipel.compression.prune.shape_flow import ShapeFlow
from archipel.graph.build import Builder
from archipel.graph.shapes import constant_array


class Cuts:
    """The axes that lose indices, for the rules that rewrite nodes. `gone` is bool, for every slot of `links`."""

    def __init__(self, graph: ir.Graph, links: Links, flow: ShapeFlow, gone: np.ndarray) -> None:
        self.op = Builder(graph, scope="pruned")
        self.links = links
        self.flow = flow
        self._kept = {key: ~gone[slots] for key, slots in links.lanes() if gone[slots].any()}

    def kept_indices(self, value: ir.Value | None, axis: int) -> np.ndarray | None:
        """bool along the axis: which indices stay; None where all do."""
        return None if value is None else self._kept.get((value, axis))

    def axes(self, value: ir.Value) -> dict[int, np.ndarray]:
        """The axes of a value that lose indices, and which stay."""
        return {axis: kept for (other, axis), kept in self._kept.items() if other is value}

    def changed(self) -> dict[ir.Value, dict[int, np.ndarray]]:
        """Every value that loses indices: axis -> which stay."""
        axes_of: dict[ir.Value, dict[int, np.ndarray]] = {}
        for (value, axis), kept in self._kept.items():
            axes_of.setdefault(value, {})[axis] = kept
        return axes_of

    def size(self, value: ir.Value, axis: int) -> int | None:
        """The new size of an axis, None where it is not fixed."""
        size, kept = self.links.shape(value)[axis], self.kept_indices(value, axis)
        return size if kept is None or size is None else int(kept.sum())

    def set_input(self, node: ir.Node, index: int, content: Sequence[int] | np.ndarray) -> None:
        """Give a node a constant of its own, as other nodes may read its present one."""
        node.replace_input_with(index, self.op.constant(np.asarray(content, np.int64)))

    def target(self, node: ir.Node) -> None:
        """Replace the shape that a node reads, if channels that go are part of it."""
        from archipel.compression.prune.shape_flow import TARGETS

        place, output = TARGETS[node.op_type], node.outputs[0]
        before = node.inputs[place] if place < len(node.inputs) else None
        if before is None:
            return
        computed = any(self.kept_indices(*key) is not None for key in self.flow.depends_on(before))
        # A shape computed from a size that changes may no longer fit: replace it, even if this output stays.
        if output.shape is None or not (computed or self.axes(output)):
            return
        sizes = [self.size(output, axis) for axis in range(len(output.shape))]
        # Reshape computes one open size itself.
        if node.op_type == "Reshape" and sizes.count(None) <= 1:
            self.set_input(node, place, [-1 if size is None else size for size in sizes])
            node.attributes.pop("allowzero", None)
        elif None not in sizes:
            self.set_input(node, place, [size for size in sizes if size is not None])
        else:
            self._partly_computed(node, place, before, sizes)

    def _partly_computed(self, node: ir.Node, place: int, before: ir.Value, sizes: list[int | None]) -> None:
        """Join known sizes as constants with the open ones, which are read from the old shape."""
        content = constant_array(before)
        with self.op.before(node):
            parts = []
            for axis, size in enumerate(sizes):
                known = size if size is not None or content is None else int(content.reshape(-1)[axis])
                one = self.op.constant(np.array([axis], np.int64))
                parts.append(self.op.Gather(before, one) if known is None else self.op.constant(np.array([known])))
            node.replace_input_with(place, self.op.Concat(*parts, axis=0))
