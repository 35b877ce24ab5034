"""Shape arithmetic of a graph whose only free size is the batch: computed where it is fixed, made simple where not.

Exporters compute shapes in the graph, as Shape, Slice and Concat of values deep in it. A node that needs only such a
shape then depends on the whole value. Here the shape becomes a constant, or is built from the first axis of an input.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from archipel.errors import GraphError
from archipel.graph.build import Builder
from archipel.graph.opset import OPSET
from archipel.graph.shapes import constant_array, dims, infer_node

_MAX_ELEMENTS = 16  # twice the largest rank


class Content(NamedTuple):
    """The elements of an integer tensor of rank 0 (`scalar`) or 1; None stands for the batch size."""

    scalar: bool
    elements: tuple[int | None, ...]


def fold_sizes(op: Builder, example: ir.Value, frozen: Collection[ir.Value]) -> dict[ir.Value, Content]:
    """Replace the shape arithmetic on `frozen` values. Returns the new values that depend on the batch size.

    Changes the graph, and fills in shapes of results that follow from it. `example` is an input whose first axis is the
    batch. Where that is not a symbolic size, there is nothing to replace.
    """
    batch = dims(example)[0]
    if isinstance(batch, int) or batch is None:
        return {}
    sizes = _Sizes(op, example, batch)
    known: dict[ir.Value, Content] = {}
    for node in list(op.graph):
        if node.domain != "" or not any(value in frozen or value in known for value in node.inputs):
            continue
        for value, content in _contents(node, known, batch).items():
            known[sizes.replace(value, content)] = content
        _fill_in(node, known, batch)  # a Shape node further on can be folded only where this result's shape is known
    return sizes.made


class _Sizes:
    def __init__(self, op: Builder, example: ir.Value, batch: str) -> None:
        self._op, self._example, self._batch = op, example, batch
        self.made: dict[ir.Value, Content] = {}
        self._by_content: dict[Content, ir.Value] = {}

    def replace(self, value: ir.Value, content: Content) -> ir.Value:
        """Let all readers of `value` read a value of this content instead, and return that."""
        # One value for equal contents: equal shapes then have equal operands, and computations can be merged.
        new = self._by_content.get(content)
        if new is None:
            new = self._by_content[content] = self._make(content)
            self.made.update({new: content} if None in content.elements else {})
        if not value.is_graph_output():  # an output keeps its own value, and with it its name
            value.replace_all_uses_with(new)
        return new

    def _make(self, content: Content) -> ir.Value:
        op = self._op
        if None not in content.elements:
            return op.constant(np.array(content.elements, np.int64).reshape(() if content.scalar else -1))
        with self._at_start():  # first in the graph, since any node may come to read it
            size = op.Shape(self._example, start=0, end=1)
            self.made[size] = Content(False, (None,))
            if content.scalar:
                result = op.Squeeze(size, [0])
            elif len(content.elements) == 1:
                result = size
            else:
                result = op.Concat(*(size if n is None else op.constant([n]) for n in content.elements), axis=0)
        return result

    @contextmanager
    def _at_start(self) -> Iterator[None]:
        with self._op.before(self._op.graph[0]):
            yield


def _contents(node: ir.Node, known: dict[ir.Value, Content], batch: str) -> dict[ir.Value, Content]:
    if node.op_type == "Shape" and node.inputs[0] is not None and node.inputs[0].shape is not None:
        shape = dims(node.inputs[0])
        shape = shape[node.attributes.get_int("start", 0) : node.attributes.get_int("end", len(shape))]
        # A free size other than the batch is not known here.
        if any(d is None or (isinstance(d, str) and d != batch) for d in shape):
            return {}
        return {node.outputs[0]: Content(False, tuple(d if isinstance(d, int) else None for d in shape))}
    rule = _RULES.get(node.op_type)
    given = [_content(value, known) for value in node.inputs if value is not None]
    contents = [content for content in given if content is not None]
    # Arithmetic on constants alone is none on shapes; constant folding is another pass.
    if rule is None or len(contents) < len(given) or not any(value in known for value in node.inputs):
        return {}
    result = rule(node, contents)
    return {} if result is None or len(result.elements) > _MAX_ELEMENTS else {node.outputs[0]: result}


def _content(value: ir.Value, known: dict[ir.Value, Content]) -> Content | None:
    if value in known:
        return known[value]
    array = constant_array(value)
    if array is None or array.dtype.kind != "i" or array.ndim > 1 or array.size > _MAX_ELEMENTS:
        return None
    return Content(array.ndim == 0, tuple(int(n) for n in array.reshape(-1)))


def _concat(node: ir.Node, given: list[Content]) -> Content | None:
    return Content(False, tuple(element for content in given for element in content.elements))


def _same(node: ir.Node, given: list[Content]) -> Content | None:
    return given[0] if node.op_type == "Identity" or node.attributes.get_int("to", 0) == ir.DataType.INT64 else None


def _squeeze(node: ir.Node, given: list[Content]) -> Content | None:
    return Content(True, given[0].elements) if len(given[0].elements) == 1 else None


def _unsqueeze(node: ir.Node, given: list[Content]) -> Content | None:
    return Content(False, given[0].elements) if given[0].scalar and len(given[1].elements) == 1 else None


def _reshape(node: ir.Node, given: list[Content]) -> Content | None:
    content, target = given
    if target.elements == ():
        return Content(True, content.elements)
    return Content(False, content.elements) if target.elements in ((-1,), (len(content.elements),)) else None


def _gather(node: ir.Node, given: list[Content]) -> Content | None:
    (_, elements), (scalar, places) = given
    if any(place is None or not -len(elements) <= place < len(elements) for place in places):
        return None
    return Content(scalar, tuple(elements[place] for place in places if place is not None))


def _slice(node: ir.Node, given: list[Content]) -> Content | None:
    (_, elements), *rest = given
    # Starts, ends, axes, steps: one number each, of which the axis is the only one there is, and the step is 1.
    numbers = [content.elements[0] for content in rest if len(content.elements) == 1]
    if (
        len(numbers) < len(rest)
        or None in numbers
        or numbers[2:3] not in ([], [0], [-1])
        or numbers[3:] not in ([], [1])
    ):
        return None
    return Content(False, elements[numbers[0] : numbers[1]])


def _pairwise(function: Callable[[int, int], int]) -> Callable[[ir.Node, list[Content]], Content | None]:
    def compute(node: ir.Node, given: list[Content]) -> Content | None:
        a, b = given
        # Only of fixed numbers: twice the batch size, for one, is no Content.
        size = max(len(a.elements), len(b.elements))
        if any(len(content.elements) not in (1, size) or None in content.elements for content in given):
            return None
        # One element goes with all of the other's, and none with none.
        pairs = zip(*(content.elements * (size if len(content.elements) == 1 else 1) for content in given))
        return Content(
            a.scalar and b.scalar, tuple(function(x, y) for x, y in pairs if x is not None and y is not None)
        )

    return compute


_RULES: dict[str, Callable[[ir.Node, list[Content]], Content | None]] = {
    "Concat": _concat,
    "Cast": _same,
    "Identity": _same,
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
    "Reshape": _reshape,
    "Gather": _gather,
    "Slice": _slice,
    "Add": _pairwise(operator.add),
    "Sub": _pairwise(operator.sub),
    "Mul": _pairwise(operator.mul),
}


def _fill_in(node: ir.Node, known: dict[ir.Value, Content], batch: str) -> None:
    """Infer the shapes of the node's results, where one has an unknown size other than the batch."""
    if all(
        value.shape is not None and all(isinstance(d, int) or d == batch for d in dims(value)) for value in node.outputs
    ):
        return
    target = node.inputs[1] if node.op_type in ("Reshape", "Expand") else None
    content = None if target is None else known.get(target)
    # With neither 0 (copy) nor -1 (the rest) in it, the target of a Reshape is the shape.
    if node.op_type == "Reshape" and content is not None and not {0, -1} & set(content.elements):
        node.outputs[0].shape = ir.Shape([batch if n is None else n for n in content.elements])
        return
    # Inference may find no shape at all: then the one that is there stays.
    before = [value.shape for value in node.outputs]
    with suppress(GraphError):
        infer_node(node, OPSET)
    for value, shape in zip(node.outputs, before):
        value.shape = shape if value.shape is None else value.shape
