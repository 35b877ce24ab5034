"""A graph's nodes moved into a body, which captures what it reads: what holds for the graph should hold there too."""

from __future__ import annotations

from collections.abc import Iterable

import onnx
from onnx import TensorProto, helper

FLAG = "flag"
TRIPS = 2


def in_branch(proto: onnx.ModelProto, start: int = 0) -> onnx.ModelProto:
    """The nodes from `start` on in both branches of an If on a new input FLAG, with names of their own in the second.

    The outputs are the same.
    """
    copy, outside, inside = _parts(proto, start)
    graph, outputs = copy.graph, list(copy.graph.output)
    then = helper.make_graph(_renamed(inside, ".then"), "then", [], _renamed_ports(outputs, ".then"))
    other = helper.make_graph(_renamed(inside, ".else"), "else", [], _renamed_ports(outputs, ".else"))
    node = helper.make_node("If", [FLAG], [value.name for value in outputs], then_branch=then, else_branch=other)
    graph.input.append(helper.make_tensor_value_info(FLAG, TensorProto.BOOL, []))
    _set(graph.node, [*outside, node])
    return copy


def in_loop(proto: onnx.ModelProto, start: int = 0) -> onnx.ModelProto:
    """The nodes from `start` on in a Loop of TRIPS iterations, whose outputs are stacked on a new first axis."""
    copy, outside, inside = _parts(proto, start)
    graph, outputs = copy.graph, list(copy.graph.output)
    counter = helper.make_tensor_value_info("body.i", TensorProto.INT64, [])
    before = helper.make_tensor_value_info("body.c", TensorProto.BOOL, [])
    after = helper.make_tensor_value_info("body.d", TensorProto.BOOL, [])
    nodes = [helper.make_node("Identity", ["body.c"], ["body.d"]), *_renamed(inside, ".loop")]
    body = helper.make_graph(nodes, "body", [counter, before], [after, *_renamed_ports(outputs, ".loop")])
    node = helper.make_node("Loop", ["body.trips", ""], [value.name for value in outputs], body=body)
    graph.initializer.append(helper.make_tensor("body.trips", TensorProto.INT64, [], [TRIPS]))
    _set(graph.node, [*outside, node])
    for value in graph.output:
        sizes = [helper.make_tensor_value_info("", 1, [TRIPS]).type.tensor_type.shape.dim[0]]
        _set(value.type.tensor_type.shape.dim, [*sizes, *value.type.tensor_type.shape.dim])
    return copy


def _parts(proto: onnx.ModelProto, start: int) -> tuple[onnx.ModelProto, list[onnx.NodeProto], list[onnx.NodeProto]]:
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    nodes = list(copy.graph.node)
    # What is an output of the graph has to come out of the body.
    names = {value.name for value in copy.graph.output}
    first = next((i for i, node in enumerate(nodes) if names & set(node.output)), len(nodes))
    return copy, nodes[: min(start, first)], nodes[min(start, first) :]


def _renamed(nodes: list[onnx.NodeProto], suffix: str) -> list[onnx.NodeProto]:
    made = {name for node in nodes for name in node.output if name}
    copies = []
    for node in nodes:
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        _set(copy.input, [name + suffix if name in made else name for name in node.input])
        _set(copy.output, [name + suffix if name else name for name in node.output])
        copies.append(copy)
    return copies


def _renamed_ports(ports: list[onnx.ValueInfoProto], suffix: str) -> list[onnx.ValueInfoProto]:
    copies = []
    for port in ports:
        copy = onnx.ValueInfoProto()
        copy.CopyFrom(port)
        copy.name += suffix
        copies.append(copy)
    return copies


def _set(field: object, items: Iterable[object]) -> None:
    kept = list(items)
    for item in kept:
        if hasattr(item, "SerializeToString"):
            break
    del field[:]  # type: ignore[attr-defined]
    field.extend(kept)  # type: ignore[attr-defined]
