"""Which values of a graph have rows: a batch axis along which entry i depends on example i alone.

That is proven operator by operator, from the examples on. An operator that is not here, or that may mix examples (a
mean over the batch, statistics of the batch, a fixed tensor with one entry for each position of the batch), ends the
proof, which is always safe.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import onnx_ir as ir

from archipel.converter.frozen import arithmetic, layout
from archipel.converter.frozen.rows import BatchAxes, Node, Rows
from archipel.converter.frozen.sizes import Content
from archipel.graph.shapes import Dim, dims
from archipel.graph.walk import bodies

_RULES = {**arithmetic.RULES, **layout.RULES}
# A Dropout may drop: its rule says when it does not.
_RANDOM = frozenset(
    {"RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Multinomial", "Bernoulli", "Dropout"}
)


def batch_axes(graph: ir.Graph, examples: Collection[ir.Value], sizes: Mapping[ir.Value, Content]) -> BatchAxes:
    """Find the values with rows that depend on constants and `examples`, graph inputs whose first axis is the batch.

    `sizes` has what is known about the content of shapes that the graph computes (`sizes.fold_sizes`).
    """
    batch = next((dims(value)[0] for value in examples), None)
    found = BatchAxes({value: Rows(0) for value in examples}, set(graph.initializers.values()))
    found.fixed.difference_update(graph.inputs)
    for node in graph:
        if node.domain != "" or bodies(node):
            continue
        inputs = [value for value in node.inputs if value is not None]
        if node.op_type not in _RANDOM and all(value in found.fixed for value in inputs):
            found.fixed.update(node.outputs)
            continue
        rule = _RULES.get(node.op_type)
        known = all(value in found.fixed or value in found.rows or value in sizes for value in inputs)
        if rule is None or not known or any(value.shape is None for value in (*inputs, *node.outputs[:1])):
            continue
        for value, rows in zip(node.outputs, rule(Node(node, found, sizes))):
            if rows is not None and _agrees(value, rows, batch):
                found.rows[value] = rows
    return found


def _agrees(value: ir.Value, rows: Rows, batch: Dim) -> bool:
    """Whether what is known about the value's shape allows it."""
    if value.shape is None or rows.axis >= len(dims(value)):
        return False
    size, others = dims(value)[rows.axis], [d for axis, d in enumerate(dims(value)) if axis != rows.axis]
    if isinstance(batch, int):
        return size is None or size == batch * rows.each
    # A fixed size comes from a broadcast of a batch of one; the batch size elsewhere, from pairs of examples.
    return not isinstance(size, int) and batch not in others
