"""Walking over graphs: into the bodies of loops and branches, along what nodes read, forwards and backwards.

A *body* is a graph that is an attribute of a node (of If, Loop, Scan). Beside the node's inputs it may read values of
the graphs around it: it captures them. Functions that take `nodes` want them in the graph's order, each after those
whose results it reads.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator

import onnx
import onnx_ir as ir

# Of onnx_ir graphs.


def bodies(node: ir.Node) -> list[ir.Graph]:
    """The graphs that are attributes of the node."""
    found: list[ir.Graph] = []
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            found.append(attribute.as_graph())
        elif attribute.type == ir.AttributeType.GRAPHS:
            found.extend(attribute.as_graphs())
    return found


def levels(graph: ir.Graph) -> list[ir.Graph]:
    """The graph, then every body in it, those inside bodies included."""
    return [graph, *graph.subgraphs()]


def inner_nodes(graph: ir.Graph) -> Iterator[ir.Node]:
    """The nodes of every body in the graph, without those of the graph itself (for both: `graph.all_nodes()`)."""
    for body in graph.subgraphs():
        yield from body


def values(graph: ir.Graph) -> Iterator[ir.Value]:
    """Inputs, initializers and the nodes' results, without those of bodies. An input may be an initializer as well."""
    yield from graph.inputs
    yield from graph.initializers.values()
    for node in graph:
        yield from node.outputs


def dependencies(node: ir.Node) -> list[ir.Value]:
    """What a node reads: its inputs, and what its bodies capture. A value comes as often as it is read."""
    found = [value for value in node.inputs if value is not None]
    for body in bodies(node):
        found.extend(captured_values(body))
    return found


def captured_values(body: ir.Graph) -> list[ir.Value]:
    """What a body reads of the graphs around it."""
    found: list[ir.Value] = []
    own: set[ir.Value] = {*body.inputs, *body.initializers.values()}
    for node in body:
        found.extend(value for value in dependencies(node) if value not in own)
        own.update(node.outputs)
    found.extend(value for value in body.outputs if value not in own)
    return found


# Forwards and backwards along what nodes read.


def dependents(nodes: Iterable[ir.Node], sources: Iterable[ir.Value]) -> Iterator[ir.Node]:
    """The nodes that read a source, or a result of one of these nodes."""
    found = set(sources)
    for node in nodes:
        if any(value in found for value in dependencies(node)):
            found.update(node.outputs)
            yield node


def descendants(nodes: Iterable[ir.Node], sources: Iterable[ir.Value]) -> set[ir.Value]:
    """The sources and all that is computed with one of them."""
    found = set(sources)
    for node in dependents(nodes, list(found)):
        found.update(node.outputs)
    return found


def ancestors(nodes: Iterable[ir.Node], targets: Iterable[ir.Value]) -> set[ir.Value]:
    """The targets and all that one of them is computed with."""
    found = set(targets)
    for node in reversed(list(nodes)):
        if any(value in found for value in node.outputs):
            found.update(dependencies(node))
    return found


def computable_values(nodes: Iterable[ir.Node], given: Iterable[ir.Value]) -> set[ir.Value]:
    """What is given, and what the nodes compute of nothing else."""
    found = set(given)
    for node in nodes:
        if all(value in found for value in dependencies(node)):
            found.update(node.outputs)
    return found


def last_readers(nodes: Iterable[ir.Node]) -> dict[ir.Value, ir.Node]:
    """Each value that is read -> the last node that reads it."""
    found: dict[ir.Value, ir.Node] = {}
    for node in nodes:
        found.update(dict.fromkeys(dependencies(node), node))
    return found


# From one value on.


def origins(value: ir.Value) -> Iterator[ir.Value]:
    """The value itself, then all that it is computed of, each once."""
    seen: set[ir.Value] = set()
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if each in seen:
            continue
        seen.add(each)
        yield each
        maker = each.producer()
        if maker is not None:
            waiting.extend(dependencies(maker))


def trace_back(value: ir.Value, op_types: Collection[str]) -> ir.Value:
    """Where the value comes from before nodes of these types, which hand on what their first input is."""
    while (maker := value.producer()) is not None and maker.op_type in op_types:
        source = maker.inputs[0]
        if source is None:
            break
        value = source
    return value


def only_use(value: ir.Value) -> tuple[ir.Node, int] | None:
    """Who reads the value, as which of its inputs, where that is the only use; an output of the graph has another."""
    uses = value.uses()
    return next(iter(uses)) if len(uses) == 1 and not value.is_graph_output() else None


def only_reader(value: ir.Value) -> ir.Node | None:
    """As `only_use`, without the place."""
    use = only_use(value)
    return None if use is None else use[0]


def final_readers(value: ir.Value, hands_on: Callable[[ir.Node], bool]) -> list[tuple[ir.Node, int]]:
    """Who reads the value, as which input, behind the nodes that only hand their first input on."""
    found: list[tuple[ir.Node, int]] = []
    waiting = [value]
    while waiting:
        for node, index in waiting.pop().uses():
            if index == 0 and hands_on(node):
                waiting.append(node.outputs[0])
            else:
                found.append((node, index))
    return found


# Of protobufs, before they are onnx_ir graphs.


def proto_bodies(node: onnx.NodeProto) -> list[onnx.GraphProto]:
    """The graphs that are attributes of the node."""
    found: list[onnx.GraphProto] = []
    for attribute in node.attribute:
        if attribute.HasField("g"):
            found.append(attribute.g)
        found.extend(attribute.graphs)
    return found


def proto_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """Each node, followed by those inside it."""
    for node in nodes:
        yield node
        for body in proto_bodies(node):
            yield from proto_nodes(body.node)
