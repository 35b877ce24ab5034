"""Shapes that a graph computes: from which sizes of which values each number comes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from archipel.compression.prune.links import Key, Links
from archipel.graph.shapes import constant_array

TARGETS = {"Reshape": 1, "Expand": 1, "ConstantOfShape": 0, "Resize": 3}
"""Operator -> the input where it reads a shape. That shape is replaced when channels that go are part of it."""

_ARITHMETIC = {"Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Div": np.floor_divide}


class Number(NamedTuple):
    """A number computed from sizes: its value, None if unknown, and the axes whose sizes went into it."""

    size: int | None
    axes: frozenset[Key]


class ShapeFlow:
    """Follows sizes from Shape to the operators that use them. Sizes that are used for more than shapes must stay."""

    def __init__(self, links: Links) -> None:
        self._links = links
        self._numbers: dict[ir.Value, list[Number]] = {}

    def numbers(self, value: ir.Value | None) -> list[Number] | None:
        """The elements of a computed or constant shape; None for other values."""
        if value is None:
            return None
        if value in self._numbers:
            return self._numbers[value]
        content = constant_array(value)
        if content is None or content.dtype.kind not in "iu" or content.ndim > 1:
            return None
        return [Number(int(number), frozenset()) for number in content.reshape(-1)]  # no size went in

    def follow(self, node: ir.Node) -> bool:
        """Whether the node computes with sizes and nothing else; if so, its result is recorded."""
        if node.domain != "" or len(node.outputs) != 1:
            return False
        if node.op_type == "Shape":
            numbers = self._shape(node)
        elif any(value in self._numbers for value in node.inputs):
            numbers = self._compute(node)
        else:
            return False
        if numbers is not None:
            self._numbers[node.outputs[0]] = numbers
        return numbers is not None

    def meet(self, node: ir.Node) -> None:
        """Let a node that is not followed read sizes: they must stay, unless they are its output's shape (TARGETS)."""
        target = TARGETS.get(node.op_type) if node.domain == "" else None
        for index, value in enumerate(node.inputs):
            if value is None or value not in self._numbers:
                continue
            if index != target:
                self.leak(value, "nodes compute with the number of channels")
            elif node.outputs[0].shape is not None:
                numbers, sizes = self._numbers[value], node.outputs[0].shape
                for axis, (number, size) in enumerate(zip(numbers, sizes)):
                    # Shape inference left this size open, but the computation gives it.
                    if not isinstance(size, int) and number.size is not None and number.size > 0:
                        self._links.set_size(node.outputs[0], axis, number.size)
                    elif not isinstance(size, int):
                        self._keep(number, "the number of channels goes into an open size")

    def leak(self, value: ir.Value, why: str) -> None:
        """Keep the axes whose sizes went into `value`."""
        for number in self._numbers.get(value, []):
            self._keep(number, why)

    def depends_on(self, value: ir.Value | None) -> set[Key]:
        """The axes whose sizes went into a shape."""
        return set() if value is None else {key for number in self._numbers.get(value, []) for key in number.axes}

    def _keep(self, number: Number, why: str) -> None:
        for value, axis in number.axes:
            self._links.fix(value, axis, why)

    def _shape(self, node: ir.Node) -> list[Number] | None:
        source = node.inputs[0]
        if source is None or source.shape is None:
            return None
        sizes = self._links.shape(source)
        start, end = node.attributes.get_int("start", 0), node.attributes.get_int("end", len(sizes))
        return [Number(sizes[axis], frozenset({(source, axis)})) for axis in range(len(sizes))[start:end]]

    def _compute(self, node: ir.Node) -> list[Number] | None:
        inputs = [self.numbers(value) for value in node.inputs]
        first = inputs[0] if inputs else None
        if first is None:
            return None
        if node.op_type in ("Squeeze", "Unsqueeze", "Reshape", "Identity", "Cast"):
            # These leave the elements of a vector in order.
            return first if _is_vector(node.outputs[0]) and _is_integer(node.outputs[0]) else None
        if node.op_type == "Concat":
            return None if None in inputs else [number for numbers in inputs for number in numbers or []]
        if node.op_type == "Gather":
            places = constant_array(node.inputs[1])
            # The usual way to read one size of a Shape.
            return None if places is None or places.ndim > 1 else [first[int(i)] for i in places.reshape(-1)]
        if node.op_type == "Slice":
            bounds = [constant_array(value) for value in node.inputs[1:]]
            if any(bound is None or bound.size != 1 for bound in bounds) or len(bounds) < 2:
                return None
            start, end = (int(bound.reshape(())) for bound in bounds[:2] if bound is not None)
            step = 1 if len(bounds) < 4 or bounds[3] is None else int(bounds[3].reshape(()))
            return first[start:end:step] if step > 0 else None
        if node.op_type in _ARITHMETIC and len(inputs) == 2 and inputs[1] is not None:
            return _combine(node.op_type, first, inputs[1])
        return None


def _combine(op_type: str, left: list[Number], right: list[Number]) -> list[Number] | None:
    length = max(len(left), len(right))
    if len(left) not in (1, length) or len(right) not in (1, length):
        return None
    numbers = []
    for a, b in zip(left * (length // len(left)), right * (length // len(right))):
        size = None
        # An unknown size is still made of known axes.
        if a.size is not None and b.size is not None and not (op_type == "Div" and b.size == 0):
            size = int(_ARITHMETIC[op_type](a.size, b.size))
        numbers.append(Number(size, a.axes | b.axes))
    return numbers


def _is_vector(value: ir.Value) -> bool:
    return value.shape is not None and len(value.shape) <= 1


def _is_integer(value: ir.Value) -> bool:
    return value.dtype in (ir.DataType.INT64, ir.DataType.INT32)
