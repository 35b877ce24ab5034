"""Which values of a graph have rows: a batch axis along which entry i depends on example i alone.

The proof goes operator by operator, from the examples on. It ends at an operator that has no rule, or that may mix
examples (a mean over the batch, statistics of the batch, a fixed tensor with one entry for each position of the batch).
Ending early is always safe: the value is then computed in every step.
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
# A result of these differs from run to run although all inputs are fixed. Dropout's rule says when it does not drop.
_RANDOM = frozenset(
    {"RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Multinomial", "Bernoulli", "Dropout"}
)


def batch_axes(graph: ir.Graph, examples: Collection[ir.Value], sizes: Mapping[ir.Value, Content]) -> BatchAxes:
    """Find the values with rows that depend on constants and `examples`, graph inputs whose first axis is the batch.

    `sizes` has what is known about the content of shapes that the graph computes (`sizes.fold_sizes`).
    """
    batch = next((dims(value)[0] for value in examples), None)
    axes = BatchAxes({value: Rows(0) for value in examples}, set(graph.initializers.values()))
    # An initializer that is an input as well is only a default: a caller may feed another value.
    axes.fixed.difference_update(graph.inputs)
    # Nodes come after those whose results they read, so one pass sees every input before its readers.
    for node in graph:
        if node.domain != "" or bodies(node):  # a body may read values around it that are not among the node's inputs
            continue
        inputs = [value for value in node.inputs if value is not None]
        if node.op_type not in _RANDOM and all(value in axes.fixed for value in inputs):
            axes.fixed.update(node.outputs)
            continue
        rule = _RULES.get(node.op_type)
        known = all(value in axes.fixed or value in axes.rows or value in sizes for value in inputs)
        # Rules compare ranks and sizes, so they need the shapes.
        if rule is None or not known or any(value.shape is None for value in (*inputs, *node.outputs[:1])):
            continue
        for value, rows in zip(node.outputs, rule(Node(node, axes, sizes))):
            if rows is not None and _agrees(value, rows, batch):
                axes.rows[value] = rows
    return axes


def _agrees(value: ir.Value, rows: Rows, batch: Dim) -> bool:
    """Whether the value's known shape allows these rows: a second check, of what a rule has concluded."""
    if value.shape is None or rows.axis >= len(dims(value)):
        return False
    size, others = dims(value)[rows.axis], [d for axis, d in enumerate(dims(value)) if axis != rows.axis]
    if isinstance(batch, int):
        return size is None or size == batch * rows.each
    # A fixed size would come from broadcasting a batch of one; the batch size on another axis, from pairs of examples.
    return not isinstance(size, int) and batch not in others
