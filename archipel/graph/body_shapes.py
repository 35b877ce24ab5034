"""Types and shapes inside the bodies of loops and branches, from those of the values outside."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from archipel.graph.markers import MARKERS
from archipel.graph.opset import OPSET
from archipel.graph.shapes import Dim, dims, infer_node, same_dim, with_axis
from archipel.graph.walk import bodies, levels, values


def infer_bodies(node: ir.Node) -> None:
    """Give the values in the bodies of an If, Loop or Scan the types and shapes that they lack, as far as ONNX's
    inference finds them; then the node's results, too.

    A state of a Loop may change its shape from one iteration to the next, so ONNX declares no shape for it. Here it has
    the shape that it starts with if the body returns the same shape again; sizes that may change are unknown.
    """
    if not any(value.dtype is None or value.shape is None for value in _all_values(node)):
        return
    if node.op_type == "If":
        for body in bodies(node):
            infer_graph(body)
        then, otherwise = (node.attributes[name].as_graph() for name in ("then_branch", "else_branch"))
        for result, a, b in zip(node.outputs, then.outputs, otherwise.outputs):
            _set(result, a.type or b.type, _common(a.shape, b.shape) if _same_rank(a, b) else None)
    elif node.op_type == "Loop":
        _infer_loop(node)
    elif node.op_type == "Scan":
        _infer_scan(node)


def _all_values(node: ir.Node) -> Iterator[ir.Value]:
    yield from node.outputs
    for body in bodies(node):
        for level in levels(body):
            yield from values(level)


def infer_graph(graph: ir.Graph) -> None:
    """As `infer_bodies`, for all nodes of a graph that has loops or branches, and for what is computed from these."""
    for node in graph:
        if bodies(node):
            infer_bodies(node)
        elif (node.domain, node.op_type) in MARKERS and (marked := node.inputs[-1]) is not None:
            _set(node.outputs[0], marked.type, marked.shape)
        elif node.domain == "" and any(value.dtype is None or value.shape is None for value in node.outputs):
            infer_node(node, OPSET)


def _infer_loop(node: ir.Node) -> None:
    body = node.attributes["body"].as_graph()
    initial = node.inputs[2:]
    number, condition, *states = body.inputs
    _set(number, ir.TensorType(ir.DataType.INT64), ir.Shape([]))
    given = node.inputs[1] if len(node.inputs) > 1 else None
    _set(condition, ir.TensorType(ir.DataType.BOOL), None if given is None else given.shape)
    unknown = [value for value in _all_values(node) if value.shape is None]
    shapes = {}
    for state, start in zip(states, initial):
        if start is not None:
            _set(state, start.type, None)
            if state.shape is None:
                shapes[state] = start.shape
    following = dict(zip(states, body.outputs[1:]))
    while True:
        for value in unknown:
            value.shape = shapes.get(value)
        infer_graph(body)
        # Where the guess was wrong sizes become unknown, which may show that others change, too.
        found = {state: _common(shape, following[state].shape) for state, shape in shapes.items()}
        if found == shapes:
            break
        shapes = found
    for result, state in zip(node.outputs, states):
        _set(result, state.type, state.shape)
    for result, value in zip(node.outputs[len(states) :], body.outputs[1 + len(states) :]):
        _set(result, value.type, None if value.shape is None else ir.Shape([None, *dims(value)]))


def _infer_scan(node: ir.Node) -> None:
    body = node.attributes["body"].as_graph()
    count = node.attributes["num_scan_inputs"].as_int()
    carried = len(node.inputs) - count
    axes = _axes(node, "scan_input_axes", count)
    length: Dim = None
    for inside, outside in zip(body.inputs[:carried], node.inputs[:carried]):
        if outside is not None:
            _set(inside, outside.type, outside.shape)
    for inside, sequence, axis in zip(body.inputs[carried:], node.inputs[carried:], axes):
        if sequence is not None and sequence.shape is not None:
            shape = list(sequence.shape)
            length = _plain(shape.pop(axis))
            _set(inside, sequence.type, ir.Shape(shape))
    infer_graph(body)
    for result, state in zip(node.outputs, body.inputs[:carried]):
        _set(result, state.type, state.shape)
    stacked = body.outputs[carried:]
    for result, value, axis in zip(
        node.outputs[carried:], stacked, _axes(node, "scan_output_axes", len(stacked)), strict=True
    ):
        _set(result, value.type, None if value.shape is None else with_axis(value, axis, length))


def _axes(node: ir.Node, name: str, count: int) -> list[int]:
    attribute = node.attributes.get(name)
    return [0] * count if attribute is None else list(attribute.as_ints())


def _set(value: ir.Value, kind: ir.TypeProtocol | None, shape: ir.Shape | None) -> None:
    if value.type is None:
        value.type = kind
    if value.shape is None and shape is not None:
        value.shape = ir.Shape(list(shape))


def _common(a: ir.Shape | None, b: ir.Shape | None) -> ir.Shape | None:
    """The shape `a` with unknown sizes where `b` has others, or where nothing is known of `b`."""
    if a is None:
        return None
    if b is None or len(a) != len(b):
        return ir.Shape([None] * len(a))
    return ir.Shape([x if same_dim(_plain(x), _plain(y)) else None for x, y in zip(a, b)])


def _plain(size: int | ir.SymbolicDim) -> Dim:
    return size if isinstance(size, int) else size.value


def _same_rank(a: ir.Value, b: ir.Value) -> bool:
    return a.shape is not None and b.shape is not None and len(a.shape) == len(b.shape)
