"""Bodies of If, Loop and Scan in the one form that the rest of the code expects."""

from __future__ import annotations

import onnx
import onnx_ir as ir

from archipel.graph.walk import levels, proto_bodies, values


def separate_bodies(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The model with bodies that share nothing: every value has a name of its own, every output of a body a node of its
    own in that body, and what a body stores lies in the main graph.

    Branches of an If may use the same names, but inference would mix them up. A branch may return a value of the graph
    around it, which no runtime takes. Weights are parameters wherever they are read, and those are initializers of the
    main graph.
    """
    if not any(proto_bodies(node) for node in proto.graph.node):
        return proto
    model = ir.from_proto(proto)
    _name_apart(model.graph)
    for body in model.graph.subgraphs():
        _compute_outputs(body, model.graph)
    lift_initializers(model)
    return ir.to_proto(model)


def lift_initializers(model: ir.Model) -> None:
    """Move the initializers of bodies to the main graph, under the names that they have. Changes `model`."""
    for body in model.graph.subgraphs():
        for value in list(body.initializers.values()):
            if not value.is_graph_input():
                body.initializers.pop(str(value.name))
                model.graph.register_initializer(value)


def _name_apart(main: ir.Graph) -> None:
    owners: dict[str, ir.Value] = {}
    for graph in levels(main):
        for value in list(values(graph)):
            if not value.name or owners.get(value.name) is value:
                continue  # an input may be an initializer as well
            name, count = value.name, 1
            while value.name in owners:
                count += 1
                value.name = f"{name}_{count}"
            owners[value.name] = value


def _compute_outputs(body: ir.Graph, main: ir.Graph) -> None:
    taken = {value.name for graph in levels(main) for value in values(graph)}
    seen: set[ir.Value] = set()
    for index, value in enumerate(list(body.outputs)):
        maker = value.producer()
        if maker is not None and maker.graph is body and value not in seen:
            seen.add(value)
            continue
        name, count = f"{value.name}_out", 1
        while name in taken:
            count += 1
            name = f"{value.name}_out_{count}"
        taken.add(name)
        copy = ir.Value(name=name, type=value.type, shape=value.shape)
        body.append(ir.Node("", "Identity", [value], outputs=[copy], name=name))
        body.outputs[index] = copy
