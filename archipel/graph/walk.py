"""Walking over graphs: into the bodies of loops and branches, and along the edges, forwards and backwards.

A *body* is a graph that is an attribute of a node (of If, Loop, Scan). A body may read values of the graphs around it
without having them as inputs: it captures them. Functions that take `nodes` expect them in the graph's order, each node
after those whose results it reads, so one sweep is enough.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field

import onnx
import onnx_ir as ir

# For onnx_ir graphs.


def bodies(node: ir.Node) -> list[ir.Graph]:
    """The graphs that are attributes of the node."""
    graphs: list[ir.Graph] = []
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            graphs.append(attribute.as_graph())
        elif attribute.type == ir.AttributeType.GRAPHS:
            graphs.extend(attribute.as_graphs())
    return graphs


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
    """The values that a node reads: its inputs, and what its bodies capture; a value occurs as often as it is read."""
    read = [value for value in node.inputs if value is not None]
    for body in bodies(node):
        read.extend(captured_values(body))
    return read


def captured_values(body: ir.Graph) -> list[ir.Value]:
    """The values that a body reads from the graphs around it."""
    outside: list[ir.Value] = []
    own: set[ir.Value] = {*body.inputs, *body.initializers.values()}
    for node in body:
        # `dependencies` includes what bodies inside this one capture; some of that may be this body's own.
        outside.extend(value for value in dependencies(node) if value not in own)
        own.update(node.outputs)
    # A branch may return a value of the outer graph without a node in between.
    outside.extend(value for value in body.outputs if value not in own)
    return outside


@dataclass
class Flow:
    """One body of a node.

    Attributes:
        body: the body.
        entries: pairs (input of the node, input of the body).
        feedback: pairs (output of the body, input of the body that is the same in the next iteration).
        results: pairs (value of the body, result of the node); a loop's last one, or all of them stacked.
        deciding: values that decide whether or how often the body runs: of the body, or of the graph around it.
    """

    body: ir.Graph
    entries: list[tuple[ir.Value, ir.Value]] = field(default_factory=list)
    feedback: list[tuple[ir.Value, ir.Value]] = field(default_factory=list)
    results: list[tuple[ir.Value, ir.Value]] = field(default_factory=list)
    deciding: list[ir.Value] = field(default_factory=list)


def flows(node: ir.Node) -> list[Flow]:
    """The bodies of an If, Loop or Scan; none for any other node."""
    if node.domain == "" and node.op_type == "If":
        condition = [value for value in node.inputs if value is not None]
        return [Flow(b, results=list(zip(b.outputs, node.outputs)), deciding=condition) for b in bodies(node)]
    if node.domain == "" and node.op_type == "Loop":
        body = node.attributes["body"].as_graph()
        states = body.inputs[2:]
        return [
            Flow(
                body,
                [(outside, inside) for outside, inside in zip(node.inputs, body.inputs) if outside is not None],
                list(zip(body.outputs, body.inputs[1:])),
                [*zip(body.outputs[1:], node.outputs), *zip(states, node.outputs)],  # without an iteration the latter
                [*(value for value in node.inputs[: len(node.inputs) - len(states)] if value), body.outputs[0]],
            )
        ]
    if node.domain == "" and node.op_type == "Scan":
        body = node.attributes["body"].as_graph()
        carried = len(node.inputs) - node.attributes["num_scan_inputs"].as_int()
        return [
            Flow(
                body,
                [(outside, inside) for outside, inside in zip(node.inputs, body.inputs) if outside is not None],
                list(zip(body.outputs[:carried], body.inputs[:carried])),
                list(zip(body.outputs, node.outputs)),
            )
        ]
    return []


# Forwards and backwards along the edges.


def dependents(nodes: Iterable[ir.Node], sources: Iterable[ir.Value]) -> Iterator[ir.Node]:
    """The nodes that read a source, or a result of one of these nodes."""
    reached = set(sources)
    for node in nodes:
        if any(value in reached for value in dependencies(node)):
            reached.update(node.outputs)
            yield node


def descendants(nodes: Iterable[ir.Node], sources: Iterable[ir.Value]) -> set[ir.Value]:
    """The sources and all values computed from one of them."""
    reached = set(sources)
    for node in dependents(nodes, list(reached)):
        reached.update(node.outputs)
    return reached


def ancestors(nodes: Iterable[ir.Node], targets: Iterable[ir.Value]) -> set[ir.Value]:
    """The targets and all values that one of them is computed from."""
    needed = set(targets)
    for node in reversed(list(nodes)):
        if any(value in needed for value in node.outputs):
            needed.update(dependencies(node))
    return needed


def computable_values(nodes: Iterable[ir.Node], given: Iterable[ir.Value]) -> set[ir.Value]:
    """The given values, and those that the nodes compute from nothing else; so also results of nodes without inputs."""
    known = set(given)
    for node in nodes:
        if all(value in known for value in dependencies(node)):
            known.update(node.outputs)
    return known


def last_readers(nodes: Iterable[ir.Node]) -> dict[ir.Value, ir.Node]:
    """Each value that is read -> the last node that reads it."""
    last: dict[ir.Value, ir.Node] = {}
    for node in nodes:
        last.update(dict.fromkeys(dependencies(node), node))
    return last


# From one value.


def origins(value: ir.Value) -> Iterator[ir.Value]:
    """The value itself, then all values that it is computed from, each once."""
    seen: set[ir.Value] = set()  # without it, values that many paths reach would be walked once per path
    waiting = [value]
    while waiting:
        current = waiting.pop()
        if current in seen:
            continue
        seen.add(current)
        yield current
        maker = current.producer()
        if maker is not None:
            waiting.extend(dependencies(maker))


def trace_back(value: ir.Value, op_types: Collection[str]) -> ir.Value:
    """The value in front of a chain of nodes of these types, each followed to its first input."""
    while (maker := value.producer()) is not None and maker.op_type in op_types:
        source = maker.inputs[0]
        if source is None:
            break
        value = source
    return value


def only_use(value: ir.Value) -> tuple[ir.Node, int] | None:
    """The only reader of the value and the index of the input, or None; a graph output counts as another reader."""
    uses = value.uses()
    return next(iter(uses)) if len(uses) == 1 and not value.is_graph_output() else None


def only_reader(value: ir.Value) -> ir.Node | None:
    """As `only_use`, without the index."""
    use = only_use(value)
    return None if use is None else use[0]


def final_readers(value: ir.Value, hands_on: Callable[[ir.Node], bool]) -> list[tuple[ir.Node, int]]:
    """The readers of the value, each with the index of the input, looking through nodes that only hand their first
    input on."""
    readers: list[tuple[ir.Node, int]] = []
    waiting = [value]
    while waiting:
        for node, index in waiting.pop().uses():
            if index == 0 and hands_on(node):
                waiting.append(node.outputs[0])
            else:
                readers.append((node, index))
    return readers


# For protobufs, before they are onnx_ir graphs.


def proto_bodies(node: onnx.NodeProto) -> list[onnx.GraphProto]:
    """The graphs that are attributes of the node."""
    graphs: list[onnx.GraphProto] = []
    for attribute in node.attribute:
        if attribute.HasField("g"):
            graphs.append(attribute.g)
        graphs.extend(attribute.graphs)
    return graphs


def proto_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """Each node, followed by the nodes of its bodies."""
    for node in nodes:
        yield node
        for body in proto_bodies(node):
            yield from proto_nodes(body.node)
