"""Which values a derivative passes through, and why one does not arrive."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from archipel.graph.shapes import dtype_of, is_float
from archipel.graph.walk import ancestors, dependencies

# They read the shape of their input and not its content, so no derivative passes.
_SHAPE_ONLY = frozenset({"Shape", "Size"})


def active_values(nodes: Iterable[ir.Node], sources: Iterable[ir.Value]) -> set[ir.Value]:
    """The values that depend on a source and have a cotangent: floats, and integers that stand for quantized floats.

    `nodes` in the graph's order, so one sweep is enough.
    """
    reached = set(sources)
    for node in nodes:
        if reads_content(node) and any(
            passes_derivative(node, value) for value in dependencies(node) if value in reached
        ):
            reached.update(value for value in node.outputs if _carries(node, value))
    return reached


def _carries(node: ir.Node, value: ir.Value) -> bool:
    # Scale and zero point of a DynamicQuantizeLinear are floats that depend on its input, but count as constants.
    return is_quantized(value) or (is_float(value) and not _is(node, "DynamicQuantizeLinear"))


def is_quantized(value: ir.Value) -> bool:
    """Whether the value is an integer that a quantizer made of a real number; derivatives pass straight through it."""
    node = value.producer()
    if node is None or not (_is(node, "QuantizeLinear") or _is(node, "DynamicQuantizeLinear")):
        return False
    return value is node.outputs[0] and dtype_of(value).is_integer()


def passes_derivative(node: ir.Node, value: ir.Value) -> bool:
    """Whether a node that reads this value may have a derivative in it."""
    return is_float(value) or (_is(node, "DequantizeLinear") and value is node.inputs[0] and is_quantized(value))


def influencing_values(nodes: Iterable[ir.Node], targets: Iterable[ir.Value]) -> set[ir.Value]:
    """Values, of any type, whose content a target depends on. `nodes` in the graph's order."""
    return ancestors(filter(reads_content, nodes), targets)


def reads_content(node: ir.Node) -> bool:
    """Whether the node's result depends on more of its inputs than their shapes."""
    return not (node.domain == "" and node.op_type in _SHAPE_ONLY)


def _is(node: ir.Node, op_type: str) -> bool:
    return node.domain == "" and node.op_type == op_type


def find_obstacle(nodes: Iterable[ir.Node], source: ir.Value, relevant: set[ir.Value]) -> ir.Node | None:
    """The first node that depends on `source` and passes no derivative on to a relevant output; None without one.

    Names the culprit in an error: a comparison, a cast to integers, a node that reads only the shape.
    """
    nodes = list(nodes)
    reached = active_values(nodes, [source])
    for node in nodes:
        if not reads_content(node) or not any(value in reached for value in dependencies(node)):
            continue
        if any(value in relevant for value in node.outputs) and not all(
            value in reached for value in node.outputs if value in relevant
        ):
            return node
    return None
