"""Changes to loops and branches: copies of their bodies, further results, a form that is easy to work on."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np
import onnx
import onnx_ir as ir

from archipel.graph.body_shapes import infer_bodies
from archipel.graph.build import Builder
from archipel.graph.shapes import constant_array
from archipel.graph.walk import bodies, captured_values, dependencies, levels, proto_bodies, proto_nodes, values


def prepare(op: Builder, node: ir.Node) -> None:
    """Bring a node with bodies into the form that `copy_body` and `widen` work on; what it computes stays.

    No output of a body is an input, a constant, a value from outside or another output; constants, which passes fold,
    lie in the main graph. Results that the node leaves out get names, values in its bodies types and shapes.
    """
    for body in bodies(node):
        for level in levels(body):
            inner = Builder(level, outer=op)
            seen: set[ir.Value] = set()
            for index, value in enumerate(level.outputs):
                maker = value.producer()
                if maker is None or maker.graph is not level or value in seen:
                    name, copy = inner.unique(f"{value.name}/copy"), inner.Identity(value)
                    copy.type, copy.shape, copy.name = value.type, value.shape, name
                    level.outputs[index] = copy
                seen.add(value)
            _lift_initializers(op, level)  # after that: a constant of the main graph cannot be an output of two bodies
    for value in node.outputs:
        value.name = value.name or op.unique(f"{node.name}/unused")
    infer_bodies(node)


def _lift_initializers(op: Builder, body: ir.Graph) -> None:
    for name, value in list(body.initializers.items()):
        if value.is_graph_input() or value.const_value is None:
            continue
        lifted = op.constant(value.const_value.numpy())
        del body.initializers[name]
        value.replace_all_uses_with(lifted)


def lower_initializers(graph: onnx.GraphProto, fixed: Collection[str] = ()) -> None:
    """Move each constant that one body alone reads into it, except those named `fixed`. Changes `graph`.

    ONNX Runtime takes weights for constant only if they lie in the graph that reads them: from outside a body it
    neither brings convolutions into its own layout nor joins them with what follows, and takes up to three times as
    long for frozen layers. Reading a file brings the constants back to the main graph.
    """
    read_here = {*fixed, *(value.name for value in (*graph.input, *graph.output))}
    inside: dict[str, list[onnx.GraphProto]] = {}
    below = [body for node in graph.node for body in proto_bodies(node)]
    for node in graph.node:
        read_here.update(node.input)
    for body in below:
        for name in {name for node in proto_nodes(body.node) for name in node.input}:
            inside.setdefault(name, []).append(body)
    for index, tensor in reversed(list(enumerate(graph.initializer))):
        readers = inside.get(tensor.name, [])
        if len(readers) == 1 and tensor.name not in read_here:
            readers[0].initializer.append(tensor)
            del graph.initializer[index]
    for body in below:
        lower_initializers(body, fixed)


def copy_body(op: Builder, body: ir.Graph, name: str) -> tuple[Builder, dict[ir.Value, ir.Value]]:
    """A copy of a body, with names of its own and without inputs and outputs.

    Returns its builder, and each value of the body -> the copy's. Values from outside are the same in both.
    """
    graph = body.clone(allow_outer_scope_values=True)
    graph.name = op.unique(name)
    copies = dict(zip([*body.inputs], [*graph.inputs]))
    copies.update(zip(body.initializers.values(), graph.initializers.values()))
    for node, copied in zip(body, graph):
        copies.update(zip(node.outputs, copied.outputs))
    for level in levels(graph):
        for value in list(values(level)):
            value.name = op.unique(str(value.name)) if value.name else value.name
        for node in level:
            node.name = op.unique(str(node.name)) if node.name else node.name
    graph.outputs.clear()
    graph.inputs.clear()
    return Builder(graph, name, outer=op), copies


def copy_node(op: Builder, node: ir.Node, values_there: Mapping[ir.Value, ir.Value]) -> ir.Node:
    """Emit a node once more, also in its bodies reading `values_there[value]` in place of each `value`."""
    attributes = []
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            body = attribute.as_graph()
            copied, copies = copy_body(op, body, body.name or "body")
            copied.graph.inputs.extend(copies[value] for value in body.inputs)
            copied.graph.outputs.extend(copies.get(value, value) for value in body.outputs)
            _replace_captured(copied.graph, values_there)
            attribute = ir.AttrGraph(attribute.name, copied.graph)
        attributes.append(attribute)
    name = op.title(str(node.name))
    results = [ir.Value(name=op.unique(name) if v.name else "", type=v.type, shape=v.shape) for v in node.outputs]
    inputs = [None if value is None else values_there.get(value, value) for value in node.inputs]
    copy = ir.Node(node.domain, node.op_type, inputs, attributes, overload=node.overload, outputs=results, name=name)
    copy.meta.update(node.meta)
    op.insert(copy)
    return copy


def copy_nodes(
    op: Builder, nodes: Iterable[ir.Node], values_there: Mapping[ir.Value, ir.Value]
) -> dict[ir.Value, ir.Value]:
    """Emit nodes, in their order, once more as `copy_node`. Returns `values_there` with what stands for each result."""
    there = dict(values_there)
    for node in nodes:
        there.update(zip(node.outputs, copy_node(op, node, there).outputs))
    return there


_SMALL = 64
"""Elements of a constant that a body gets of its own: cheaper than one that is carried."""


def make_scans_plain(model: ir.Model) -> int:
    """Let the body of each Scan read its own inputs alone, and each Scan its sequences from the first item on.

    What a body reads from outside is carried along unchanged; small constants move inside. What runs backwards is
    reversed before and after. Changes `model`. Returns the number of Scans that it has changed.
    """
    changed, main = 0, Builder(model.graph, scope="plain")
    for level in reversed(list(levels(model.graph))):  # the inner first: it is the body around it that captures then
        op = main if level is model.graph else Builder(level, "plain", outer=main)
        for node in list(level):
            if node.op_type != "Scan" or node.domain != "":
                continue
            backwards = any(any(_integers(node, name)) for name in _DIRECTIONS)
            if backwards:
                _run_forwards(op, node)
            captures = bool(captured_values(bodies(node)[0]))
            if captures:
                _carry(op, node)
            changed += backwards or captures
    return changed


_DIRECTIONS = ("scan_input_directions", "scan_output_directions")


def _integers(node: ir.Node, name: str) -> Sequence[int]:
    attribute = node.attributes.get(name)
    return () if attribute is None else attribute.as_ints()


def _run_forwards(op: Builder, node: ir.Node) -> None:
    sequences = node.attributes["num_scan_inputs"].as_int()
    states = len(node.inputs) - sequences
    axes = _integers(node, "scan_input_axes") or [0] * sequences
    with op.before(node):
        for index, (backwards, axis) in enumerate(zip(_integers(node, _DIRECTIONS[0]), axes), states):
            if backwards:
                node.replace_input_with(index, _reversed(op, node.inputs[index], axis))
    stacked = node.outputs[states:]
    axes = _integers(node, "scan_output_axes") or [0] * len(stacked)
    with op.after(node):
        for value, backwards, axis in zip(stacked, _integers(node, _DIRECTIONS[1]), axes):
            if backwards:
                readers, is_output = list(value.uses()), value.is_graph_output()
                turned = _reversed(op, value, axis)
                if is_output:
                    value.name, turned.name = op.unique(f"{value.name}/forwards"), value.name
                    op.graph.outputs[list(op.graph.outputs).index(value)] = turned
                for reader, index in readers:
                    reader.replace_input_with(index, turned)
    for name in _DIRECTIONS:
        node.attributes.pop(name, None)


def _reversed(op: Builder, value: ir.Value | None, axis: int) -> ir.Value:
    least = np.iinfo(np.int64).min
    turned: ir.Value = op.Slice(value, op.constant([-1]), op.constant([least]), op.constant([axis]), op.constant([-1]))
    if value is not None:
        turned.type, turned.shape = value.type, value.shape
    return turned


def _carry(op: Builder, node: ir.Node) -> None:
    body = node.attributes["body"].as_graph()
    inner, first = Builder(body, outer=op), next(iter(body))
    states = len(node.inputs) - node.attributes["num_scan_inputs"].as_int()
    outside: list[ir.Value] = []
    inside: list[ir.Value] = []
    for value in dict.fromkeys(captured_values(body)):
        array = constant_array(value)
        if array is not None and array.size <= _SMALL:
            with inner.before(first):
                own = inner.Constant(value=ir.tensor(array))
        else:
            own = ir.Value(name=inner.unique(f"{value.name}/carried"), type=value.type, shape=value.shape)
            outside.append(value)
            inside.append(own)
        _replace_captured(body, {value: own})
        if inside and own is inside[-1]:
            inner.name_output(inner.Identity(own), inner.unique(f"{value.name}/following"))
    body.inputs[states:states] = inside
    before = len(body.outputs) - len(inside)
    returned = list(body.outputs)
    body.outputs[:] = [*returned[:states], *returned[before:], *returned[states:before]]
    attributes = [attribute for name, attribute in node.attributes.items() if name != "body"]
    node.attributes.pop("body")
    inputs = [*node.inputs[:states], *outside, *node.inputs[states:]]
    kept = [ir.Value(name=op.unique(f"{node.name}/kept"), type=value.type, shape=value.shape) for value in outside]
    results = [ir.Value(name=value.name, type=value.type, shape=value.shape) for value in node.outputs]
    outputs = [*results[:states], *kept, *results[states:]]
    carrying = ir.Node("", "Scan", inputs, [ir.AttrGraph("body", body), *attributes], outputs=outputs, name=node.name)
    with op.after(node):
        op.insert(carrying)
    for old, new in zip(node.outputs, results):
        old.name = ""
        old.replace_all_uses_with(new, replace_graph_outputs=True)
    op.graph.remove(node, safe=True)


def _replace_captured(body: ir.Graph, values_there: Mapping[ir.Value, ir.Value]) -> None:
    for level in levels(body):
        for node in level:
            for index, value in enumerate(node.inputs):
                if value is not None and value in values_there:
                    node.replace_input_with(index, values_there[value])
        for index, value in enumerate(level.outputs):
            if value in values_there:
                level.outputs[index] = values_there[value]


def remove_unneeded(graph: ir.Graph, results: Iterable[ir.Value]) -> None:
    """Remove the nodes of a body that no result needs."""
    needed = set(results)
    for node in reversed(list(graph)):
        if any(value in needed for value in node.outputs):
            needed.update(dependencies(node))
            continue
        # What a removed loop or branch captures would count as used forever.
        for inner in (inner for body in bodies(node) for inner in body.all_nodes()):
            for index in range(len(inner.inputs)):
                inner.replace_input_with(index, None)
        graph.remove(node, safe=True)


def widen(op: Builder, node: ir.Node, results: Sequence[tuple[ir.Graph, ir.Value]]) -> ir.Value:
    """Give a node a further result, of which each of its bodies returns a value; a loop stacks it along axis 0.

    Returns the result, which has no type and shape yet.
    """
    for body, value in results:
        inner = Builder(body, outer=op)
        inner.name_output(value, inner.unique(f"{value.name}/kept"))
    node.resize_outputs(len(node.outputs) + 1)
    for name in ("scan_output_axes", "scan_output_directions"):
        attribute = node.attributes.get(name)
        if attribute is not None:
            node.attributes[name] = ir.AttrInt64s(name, [*attribute.as_ints(), 0])
    result = node.outputs[-1]
    result.name = op.unique(f"{node.name}/kept")
    return result
