"""Bodies of If, Loop and Scan in the one form that the rest of the code expects."""

from __future__ import annotations

from collections import Counter

import onnx
import onnx_ir as ir

from archipel.graph.walk import bodies, levels, proto_bodies, proto_nodes, values


def separate_bodies(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The model with bodies that share nothing: every value has a name of its own, every output of a body a node of its
    own in that body, and what a body stores lies in the main graph.

    Branches of an If may use the same names, but inference would mix them up. A branch may return a value of the graph
    around it, which no runtime takes. Weights are parameters wherever they are read, and those are initializers of the
    main graph.
    """
    if not any(proto_bodies(node) for node in proto.graph.node):
        return proto
    for written in (body for node in proto_nodes(proto.graph.node) for body in proto_bodies(node)):
        for port in (*written.input, *written.value_info, *written.output):
            _forget_shape_of_items(port.type)
    model = ir.from_proto(proto)
    _name_apart(model.graph)
    for body in model.graph.subgraphs():
        _compute_outputs(body, model.graph)
    lift_initializers(model)
    return ir.to_proto(model)


def forget_scalars(proto: onnx.ModelProto) -> bool:
    """Drop the shapes of scalars that bodies declare for their inputs and outputs. Changes `proto`, or returns False.

    Paddle's exporter writes a tensor of one element as a scalar there. Runtimes accept that, inference refuses it.
    """
    changed = False
    for node in proto_nodes(proto.graph.node):
        # A Loop's count and condition are scalars, and have to be declared.
        first = 2 if node.op_type == "Loop" else 0
        for body in proto_bodies(node):
            for value in (*body.input[first:], *body.value_info, *body.output):
                tensor = value.type.tensor_type
                if tensor.HasField("shape") and not tensor.shape.dim:
                    tensor.ClearField("shape")
                    changed = True
    return changed


def lift_initializers(model: ir.Model) -> None:
    """Move the initializers of bodies to the main graph, under their names where these are free. Changes `model`."""
    # Bodies of other domains' operators may not read what is around them.
    standard = [body for node in model.graph.all_nodes() if node.domain == "" for body in bodies(node)]
    if not any(body.initializers for body in standard):
        return
    taken = Counter(value.name for graph in levels(model.graph) for value in set(values(graph)))
    for body in standard:
        for value in list(body.initializers.values()):
            if value.is_graph_input():
                continue
            body.initializers.pop(str(value.name))
            if taken[value.name] > 1:
                value.name = _free(f"{value.name}", taken)
            model.graph.register_initializer(value)


def _forget_shape_of_items(kind: onnx.TypeProto) -> None:
    """Of a sequence or optional: files declare scalars where items have several ranks, which no type can say."""
    while kind.WhichOneof("value") in ("sequence_type", "optional_type"):
        kind = (kind.sequence_type if kind.HasField("sequence_type") else kind.optional_type).elem_type
        if kind.WhichOneof("value") == "tensor_type" and not kind.tensor_type.shape.dim:
            kind.tensor_type.ClearField("shape")


def _name_apart(main: ir.Graph) -> None:
    taken = Counter[str | None]()
    for graph in levels(main):
        for value in dict.fromkeys(values(graph)):  # once each: an input may be an initializer as well
            if value.name:
                value.name = _free(value.name, taken)


def _compute_outputs(body: ir.Graph, main: ir.Graph) -> None:
    taken = Counter(value.name for graph in levels(main) for value in values(graph))
    seen: set[ir.Value] = set()
    for index, value in enumerate(list(body.outputs)):
        maker = value.producer()
        if maker is not None and maker.graph is body and value not in seen:
            seen.add(value)
            continue
        name = _free(f"{value.name}_out", taken)
        copy = ir.Value(name=name, type=value.type, shape=value.shape)
        body.append(ir.Node("", "Identity", [value], outputs=[copy], name=name))
        body.outputs[index] = copy


def _free(name: str, taken: Counter[str | None]) -> str:
    """`name`, or `name_2`, `name_3`, ..., and taken from then on."""
    candidate, count = name, 1
    while taken[candidate]:
        count += 1
        candidate = f"{name}_{count}"
    taken[candidate] += 1
    return candidate
