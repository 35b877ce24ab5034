"""Which values a derivative passes through, and why one does not arrive."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import onnx_ir as ir

from archipel.graph.markers import STOP, STRAIGHT, is_marker
from archipel.graph.shapes import dtype_of, is_float
from archipel.graph.walk import Flow, dependencies, flows

# They read the shape (and type) of their input and not its content, so no derivative passes.
_SHAPE_ONLY = frozenset({"Shape", "Size", "EyeLike", "RandomNormalLike", "RandomUniformLike"})


def active_values(nodes: Iterable[ir.Node], sources: Iterable[ir.Value]) -> set[ir.Value]:
    """The values that depend on a source and have a cotangent: floats, and integers that stand for quantized floats.

    `nodes` in the graph's order, so one sweep is enough.
    """
    reached = set(sources)
    for node in nodes:
        if not reads_content(node) or not any(
            passes_derivative(node, value) for value in dependencies(node) if value in reached
        ):
            continue
        results = set(node.outputs)
        inside = [(flow, active_inside(flow, reached)) for flow in flows(node)]
        if inside:
            results = {result for flow, active in inside for output, result in flow.results if output in active}
        reached.update(value for value in results if _carries(node, value))
    return reached


def active_inside(flow: Flow, reached: Collection[ir.Value]) -> set[ir.Value]:
    """As `active_values`, for a body in any of its iterations; `reached`: values of the graphs around it."""
    sources = {*reached, *(inside for outside, inside in flow.entries if outside in reached)}
    while True:
        active = active_values(flow.body, sources)
        more = {inside for following, inside in flow.feedback if following in active} - sources
        if not more:
            return active
        sources |= more


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
    if is_marker(node, STRAIGHT) and value is not node.inputs[0]:
        return False
    return is_float(value) or (_is(node, "DequantizeLinear") and value is node.inputs[0] and is_quantized(value))


def influencing_values(nodes: Iterable[ir.Node], targets: Iterable[ir.Value]) -> set[ir.Value]:
    """Values, of any type, whose content a target depends on. `nodes` in the graph's order."""
    needed = set(targets)
    for node in reversed(list(nodes)):
        if not reads_content(node) or not any(value in needed for value in node.outputs):
            continue
        found = flows(node)
        if not found:
            # What a gradient passes straight by counts as a constant.
            needed.update(dependencies(node)[:1] if is_marker(node, STRAIGHT) else dependencies(node))
        for flow in found:
            inside = needed_inside(flow, needed)
            needed.update(inside, flow.deciding)
            needed.update(outside for outside, entry in flow.entries if entry in inside)
    return needed


def needed_inside(flow: Flow, needed: Collection[ir.Value]) -> set[ir.Value]:
    """As `influencing_values`, for a body in any of its iterations; `needed`: results of its node, among others."""
    targets = {*(output for output, result in flow.results if result in needed), *flow.deciding}
    while True:
        inside = influencing_values(flow.body, targets)
        more = {following for following, entry in flow.feedback if entry in inside} - targets
        if not more:
            return inside
        targets |= more


def reads_content(node: ir.Node) -> bool:
    """Whether the node's result depends on more of its inputs than their shapes, as far as derivatives see."""
    return not (node.domain == "" and node.op_type in _SHAPE_ONLY) and not is_marker(node, STOP)


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
