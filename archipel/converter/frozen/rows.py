"""Rows: a batch axis along which entry i depends on example i alone; and what a rule may ask about its node."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from archipel.converter.frozen.sizes import Content
from archipel.graph.shapes import Dim, constant_array, dims


class Rows(NamedTuple):
    """Axis `axis` has the size batch * `each`; example i has the `each` entries from i * each on."""

    axis: int
    each: int = 1


class BatchAxes(NamedTuple):
    """The rows of the values that have some, and the `fixed` values, which depend on no input of the graph."""

    rows: dict[ir.Value, Rows]
    fixed: set[ir.Value]


Result = Sequence[Rows | None]
"""One for each output; None where nothing is proven."""


class Node:
    """What a rule may ask about a node, by the index of an input. Inputs that are left out count as fixed."""

    def __init__(self, node: ir.Node, axes: BatchAxes, sizes: Mapping[ir.Value, Content]) -> None:
        self.node = node
        self.inputs = node.inputs
        self._axes = axes
        self._sizes = sizes

    def rows(self, index: int) -> Rows | None:
        value = self.inputs[index] if index < len(self.inputs) else None
        return None if value is None else self._axes.rows.get(value)

    def fixed(self, *indices: int) -> bool:
        values = (self.inputs[i] for i in indices if i < len(self.inputs))
        return all(value is None or value in self._axes.fixed for value in values)

    def rest_fixed(self, start: int = 1) -> bool:
        return self.fixed(*range(start, len(self.inputs)))

    def shape(self, index: int) -> tuple[Dim, ...]:
        value = self.inputs[index]
        return () if value is None else dims(value)

    def out(self) -> tuple[Dim, ...]:
        return dims(self.node.outputs[0])

    def content(self, index: int) -> np.ndarray | None:
        return constant_array(self.inputs[index]) if index < len(self.inputs) else None

    def target(self, index: int) -> Content | None:
        """The content of a shape operand, also of one that depends on the batch size."""
        value = self.inputs[index] if index < len(self.inputs) else None
        array = constant_array(value)
        if array is not None:
            return Content(array.ndim == 0, tuple(int(n) for n in array.reshape(-1)))
        return None if value is None else self._sizes.get(value)

    def given(self, index: int) -> bool:
        return index < len(self.inputs) and self.inputs[index] is not None

    def integer(self, name: str, default: int) -> int:
        return self.node.attributes.get_int(name, default)

    def one(self, rows: Rows | None) -> Result:
        return [rows]

    def all(self, rows: Rows | None) -> Result:
        return [rows] * len(self.node.outputs)


Rule = Callable[[Node], Result]
NOTHING: Result = ()


def rule_table(rules: Mapping[str, Rule]) -> dict[str, Rule]:
    """Rules by operator. A key of `rules` is one operator, or several with spaces between."""
    return {name: rule for names, rule in rules.items() for name in names.split()}


def aligned_rows(n: Node, operands: Sequence[int], rank: int) -> Rows | None:
    """The rows of a result of `rank` axes that these operands are broadcast to; None where they do not agree on one."""
    operands = [i for i in operands if n.given(i)]
    # Broadcasting aligns shapes at the last axis, so an axis moves by the number of axes that its operand lacks.
    places = {Rows(rank - len(n.shape(i)) + rows.axis, rows.each) for i in operands if (rows := n.rows(i)) is not None}
    if len(places) != 1:
        return None
    (place,) = places
    for i in operands:
        if n.rows(i) is None:
            # An operand without rows must be the same for every example: without that axis, or of size 1 on it.
            index = place.axis - (rank - len(n.shape(i)))
            if not n.fixed(i) or (index >= 0 and n.shape(i)[index] != 1):
                return None
    return place


def untouched_rows(n: Node, axis: int, first_fixed: int = 1) -> Rows | None:
    """The first input's rows, where the operator works along another `axis` and inputs from `first_fixed` are fixed."""
    rows = n.rows(0)
    if rows is None or positive_axis(axis, len(n.shape(0))) == rows.axis:
        return None
    return rows if n.rest_fixed(first_fixed) else None


def positive_axis(axis: int, rank: int) -> int:
    """The axis counted from the first one; ONNX counts a negative one from the end."""
    return axis + rank if axis < 0 else axis


def axes_operand(n: Node, index: int, rank: int) -> list[int] | None:
    """The axes in an operand, None if it is left out or computed."""
    content = n.content(index)
    return None if content is None else [positive_axis(int(a), rank) for a in content.reshape(-1)]
