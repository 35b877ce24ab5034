"""Which values a derivative passes through, and why one does not arrive."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from archipel.graph.shapes import dtype_of, is_float
from archipel.graph.walk import ancestors, dependencies

# These read the shape of their input and not its content.
_SHAPE_ONLY = frozenset({"Shape", "Size"})


def active(nodes: Iterable[ir.Node], sources: Iterable[ir.Value]) -> set[ir.Value]:
    """What depends on a source and has a cotangent: floating-point values, and integers that were quantized."""
    found = set(sources)
    for node in nodes:
        if reads_content(node) and any(passes(node, value) for value in dependencies(node) if value in found):
            found.update(value for value in node.outputs if _carries(node, value))
    return found


def _carries(node: ir.Node, value: ir.Value) -> bool:
    # The range that a DynamicQuantizeLinear finds counts as fixed.
    return quantized(value) or (is_float(value) and not _is(node, "DynamicQuantizeLinear"))


def quantized(value: ir.Value) -> bool:
    """Whether the value is an integer that stands for a real number, through which a derivative goes straight."""
    node = value.producer()
    if node is None or not (_is(node, "QuantizeLinear") or _is(node, "DynamicQuantizeLinear")):
        return False
    return value is node.outputs[0] and dtype_of(value).is_integer()


def passes(node: ir.Node, value: ir.Value) -> bool:
    """Whether a node that reads this value may have a derivative in it."""
    return is_float(value) or (_is(node, "DequantizeLinear") and value is node.inputs[0] and quantized(value))


def influencing(nodes: Iterable[ir.Node], targets: Iterable[ir.Value]) -> set[ir.Value]:
    """Values, of any type, whose content a target depends on. `nodes` in the graph's order."""
    return ancestors(filter(reads_content, nodes), targets)


def reads_content(node: ir.Node) -> bool:
    return not (node.domain == "" and node.op_type in _SHAPE_ONLY)


def _is(node: ir.Node, op_type: str) -> bool:
    return node.domain == "" and node.op_type == op_type


def obstacle(nodes: Iterable[ir.Node], source: ir.Value, relevant: set[ir.Value]) -> ir.Node | None:
    """The first node that `source` reaches where the derivative towards the relevant values ends, if any."""
    nodes = list(nodes)
    reached = active(nodes, [source])
    for node in nodes:
        if not reads_content(node) or not any(value in reached for value in dependencies(node)):
            continue
        if any(value in relevant for value in node.outputs) and not all(
            value in reached for value in node.outputs if value in relevant
        ):
            return node
    return None
