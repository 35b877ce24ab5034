"""`LaneContext`: what a batching rule works with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import onnx_ir as ir

from archipel.autodiff.context import Described
from archipel.errors import AutodiffError
from archipel.graph.build import Attribute, Builder, Operand
from archipel.graph.shapes import Dim, constant_array, dims

if TYPE_CHECKING:
    from archipel.autodiff.batching.sweep import Sweep

Size = int | ir.Value
"""A size: a number, or an int64 value [1]."""


class LaneContext(Described):
    """One node of the original graph, whose inputs are there for one lane, and the builder of the graph with lanes.

    A value is *batched* if it has another content in every lane; it then has the lanes as an additional first axis.
    Positions and shapes are those of the original node, so of one lane.

    Attributes:
        op: builder of the new graph.
        node: the node of the original graph. Its values may be asked for shapes, types and constant content only.
        count: the number of lanes, int64 [1].
    """

    def __init__(self, sweep: Sweep, node: ir.Node) -> None:
        self.sweep = sweep
        self.op: Builder = sweep.op
        self.node = node
        self.count = sweep.count

    # The original node.

    def has(self, index: int) -> bool:
        """Whether the node has this input."""
        return index < len(self.node.inputs) and self.node.inputs[index] is not None

    def input(self, index: int) -> ir.Value:
        """An input as it is in one lane. Raises AutodiffError if the node leaves it out."""
        value = self.node.inputs[index] if index < len(self.node.inputs) else None
        if value is None:
            raise AutodiffError(f"vmap: {self.title}: input {index} is missing")
        return value

    def batched(self, *indices: int) -> bool:
        """Whether one of these inputs has the lane axis."""
        return any(self.has(index) and self.input(index) in self.sweep.batched for index in indices)

    def dims(self, index: int) -> tuple[Dim, ...]:
        return dims(self.input(index))

    def rank(self, index: int) -> int:
        return len(self.dims(index))

    def constant(self, index: int) -> np.ndarray | None:
        """The content of an input, if the graph fixes it."""
        return constant_array(self.input(index)) if self.has(index) and not self.batched(index) else None

    def used(self, index: int) -> bool:
        """Whether somebody reads this output."""
        if index >= len(self.node.outputs):
            return False
        value = self.node.outputs[index]
        return bool(value.uses()) or value.is_graph_output()

    def refuse(self, reason: str) -> NoReturn:
        raise AutodiffError(f"vmap: {self.title}: {reason}")

    # Values of the new graph.

    def value(self, index: int) -> ir.Value:
        """The input in the new graph: with the lane axis if it is batched, else as it was."""
        return self.sweep.value(self.input(index))

    def values(self) -> list[ir.Value | None]:
        """All inputs in the new graph; None for those that the node leaves out."""
        return [self.value(i) if self.has(i) else None for i in range(len(self.node.inputs))]

    def aligned(self, index: int, rank: int) -> ir.Value:
        """The input for broadcasting with values of `rank` axes in a lane: axes of size 1 follow the lanes' if it has
        fewer. Not batched, it stays as it is: broadcasting aligns at the end."""
        value = self.value(index)
        missing = rank - self.rank(index)
        if not self.batched(index) or missing <= 0:
            return value
        return self.op.Unsqueeze(value, list(range(1, missing + 1)))

    def spread(self, index: int) -> ir.Value:
        """The input with the lane axis; one that is the same in all lanes is repeated."""
        value = self.value(index)
        return value if self.batched(index) else self.sweep.repeat(value)

    def same(self, *inputs: Operand, outputs: int | None = None, **changed: Attribute) -> list[ir.Value]:
        """The node's operator with its attributes, `changed` aside, applied to these inputs."""
        attributes: dict[str, Any] = {**self.node.attributes, **changed}
        count = len(self.node.outputs) if outputs is None else outputs
        return list(self.op.emit(self.node.op_type, *inputs, outputs=count, **attributes))

    # Sizes and shapes.

    def size(self, index: int, axis: int) -> Size:
        """The size of an axis of an input in one lane: a number, or int64 [1]."""
        dim = self.dims(index)[axis]
        if isinstance(dim, int):
            return dim
        start = axis % self.rank(index) + int(self.batched(index))
        return self.op.Shape(widened(self.op, self.value(index)), start=start, end=start + 1)

    def sizes(self, index: int, start: int = 0, end: int | None = None) -> list[Size]:
        """`size` of several axes in a row."""
        return [self.size(index, axis) for axis in range(self.rank(index))[start:end]]

    def reshape(self, value: ir.Value, *parts: Size) -> ir.Value:
        """Reshape to these sizes; one may be -1."""
        open_parts = [i for i, part in enumerate(parts) if not isinstance(part, int)]
        if len(open_parts) == 1 and -1 not in parts and 0 not in parts:
            parts = (*parts[: open_parts[0]], -1, *parts[open_parts[0] + 1 :])  # then it is a constant
        sizes = [part for part in parts if isinstance(part, int)]
        if len(sizes) == len(parts):
            return self.op.Reshape(value, np.array(sizes, np.int64), allowzero=1 if 0 in sizes else None)
        pieces = [part if isinstance(part, ir.Value) else np.array([part], np.int64) for part in parts]
        return self.op.Reshape(value, self.op.Concat(*pieces, axis=0), allowzero=None if -1 in sizes else 1)

    def join(self, index: int, axis: int = 0) -> ir.Value:
        """The input with the lanes as part of an axis: [..., n, ...] in a lane becomes [..., lanes * n, ...]."""
        return self.joined(self.spread(index), self.sizes(index), axis)

    def joined(self, value: ir.Value, sizes: Sequence[Size], axis: int = 0) -> ir.Value:
        """As `join`, for a value with the lane axis in front, and the sizes of its other axes."""
        if any(size != 1 for size in sizes[:axis]):
            order = [*range(1, axis + 1), 0, *range(axis + 1, len(sizes) + 1)]
            value = self.op.Transpose(value, perm=order)
        lanes, size = self.lanes, sizes[axis]
        merged = lanes * size if isinstance(lanes, int) and isinstance(size, int) else -1
        return self.reshape(value, *sizes[:axis], merged, *sizes[axis + 1 :])

    def part(self, value: ir.Value, size: Size, axis: int = 0) -> ir.Value:
        """The reverse of `join`: [..., lanes * size, ...] to [lanes, ..., size, ...]."""
        sizes: list[Size] = [
            d if isinstance(d, int) else self.op.Shape(value, start=i, end=i + 1) for i, d in enumerate(dims(value))
        ]
        value = self.reshape(value, *sizes[:axis], self.lanes, size, *sizes[axis + 1 :])
        if all(before == 1 for before in sizes[:axis]):
            return self.reshape(value, self.lanes, *sizes[:axis], size, *sizes[axis + 1 :]) if axis else value
        return self.op.Transpose(value, perm=[axis, *range(axis), *range(axis + 1, len(sizes) + 1)])

    @property
    def lanes(self) -> Size:
        """The number of lanes: a number, or int64 [1]."""
        return self.sweep.size if isinstance(self.sweep.size, int) else self.count

    def positions(self, after: int) -> ir.Value:
        """The lanes' numbers 0, 1, ..., int64 [lanes, 1, ..., 1] with `after` axes of size 1."""
        op = self.op
        if isinstance(self.sweep.size, int):
            return op.constant(np.arange(self.sweep.size).reshape(-1, *[1] * after))
        numbers = op.Range(np.array(0), op.Squeeze(self.count, [0]), np.array(1))
        return op.Unsqueeze(numbers, list(range(1, after + 1))) if after else numbers


_WIDER = {ir.DataType.INT4: ir.DataType.INT8, ir.DataType.UINT4: ir.DataType.UINT8}


def widened(op: Builder, value: ir.Value) -> ir.Value:
    """Numbers of four bits as those of eight: ONNX Runtime moves none of four bits, and does not tell their shape."""
    wider = None if value.dtype is None else _WIDER.get(value.dtype)
    return value if wider is None else op.Cast(value, to=int(wider))
