"""`linearize`: a jvp in two parts, one that computes at a point and one that is linear in the tangents.

The split is a partial evaluation of the jvp's graph, with the tangents unknown: what depends on them is the linear
part, and what that reads of the rest are the residuals (Radul et al., You Only Linearize Once, 2023, section 4).
"""

from __future__ import annotations

from collections.abc import Collection, MutableSequence, Sequence

import onnx_ir as ir

from archipel.autodiff.api import jvp
from archipel.autodiff.overrides import Overrides
from archipel.autodiff.ports import free_name, input_like, listed_names
from archipel.graph.build import Builder
from archipel.graph.model import Model
from archipel.graph.parameters import parameter_names
from archipel.graph.passes import remove_dead_code
from archipel.graph.shapes import dtype_of
from archipel.graph.walk import bodies, computable_values, dependencies, descendants, values


def linearize(
    model: Model, of: Sequence[str], wrt: Sequence[str], *, rules: Overrides | None = None
) -> tuple[Model, Model]:
    """The derivative of a model at a point, as a linear model: for many tangents at the same point, as in conjugate
    gradients, where `jvp` would compute the model itself again for each.

    Arguments:
        model: any model; it stays as it is.
        of: names of floating-point values of any shape.
        wrt: names of floating-point values: graph inputs, initializers (weights) or inner values.
        rules: as for `gradient`.

    Returns two models. The first has the inputs of `model` and its outputs, followed by the residuals: outputs
    `<value>.residual`, each named after the value of the jvp's graph that it is. The second has an input
    `<name>.tangent` for each name in `wrt` and one for each residual, of the same name, shape and type, and an output
    `<name>.tangent` for each name in `of`. It is linear in the tangents. What depends on the point alone it reads as
    residuals; only zeros, and masks as floating-point numbers, it makes itself, from a shape or a boolean mask, since
    these take less memory as residuals. Weights that it multiplies tangents with are its own parameters, under their
    names.

    Raises the errors of `jvp`.

    Example:
        at_point, tangents_only = autodiff.linearize(model, of=["output"], wrt=["input"])
    """
    pushed = jvp(model, of, wrt, rules=rules)
    graph = pushed.ir.graph
    tangents = graph.inputs[len(graph.inputs) - len(listed_names(wrt, "wrt")) :]
    moved = graph.outputs[len(graph.outputs) - len(listed_names(of, "of")) :]
    residuals = _residuals(graph, tangents, moved, parameter_names(pushed.ir))
    ports = _port_names(graph, residuals)
    return _at_point(pushed, ports, len(tangents), len(moved)), _linear(pushed, ports, len(tangents), len(moved))


def _residuals(
    graph: ir.Graph, tangents: Sequence[ir.Value], moved: Sequence[ir.Value], parameters: Collection[str]
) -> list[ir.Value]:
    """What the part that depends on tangents reads of the rest, in the graph's order."""
    nodes = list(graph)
    linear = descendants(nodes, tangents)
    fixed = [
        value for value in graph.initializers.values() if not value.is_graph_input() and value.name not in parameters
    ]
    constants = computable_values((node for node in nodes if not bodies(node)), fixed)
    found: set[ir.Value] = set()
    waiting = [*moved, *(value for node in nodes if node.outputs[0] in linear for value in dependencies(node))]
    seen = set(waiting)
    while waiting:
        value = waiting.pop()
        node = value.producer()
        if value in linear or (value.is_initializer() and not value.is_graph_input()):
            continue
        if node is not None and (value in constants or _is_larger_than_its_input(node)):
            fresh = [source for source in dependencies(node) if source not in seen]
            seen.update(fresh)
            waiting.extend(fresh)
        else:
            found.add(value)
    return [value for value in values(graph) if value in found]


def _is_larger_than_its_input(node: ir.Node) -> bool:
    """Whether the linear part makes the node's result itself, from less memory: filled tensors, and boolean masks as
    floating-point numbers."""
    if node.domain != "" or not node.inputs or node.inputs[0] is None:
        return False
    return node.op_type == "ConstantOfShape" or (
        node.op_type == "Cast" and dtype_of(node.inputs[0]) == ir.DataType.BOOL
    )


def _port_names(graph: ir.Graph, residuals: Sequence[ir.Value]) -> dict[str, str]:
    """Name of each residual in the graph -> name of the output and input that it becomes."""
    op, names = Builder(graph), list[str]()
    for value in residuals:
        name = free_name(op, str(value.name), "residual")
        while name in names:
            name += ".residual"
        names.append(name)
    # Read now: an inner value gives way to a port of its name.
    return dict(zip((str(value.name) for value in residuals), names))


def _at_point(pushed: Model, ports: dict[str, str], tangents: int, moved: int) -> Model:
    result = pushed.copy()
    graph = result.ir.graph
    known = {str(value.name): value for value in values(graph)}
    _drop(graph.outputs, len(graph.outputs) - moved, len(graph.outputs))
    op = Builder(graph)
    for name, port in ports.items():
        op.name_output(known[name], port)
    remove_dead_code(result.ir)
    _drop(graph.inputs, len(graph.inputs) - tangents, len(graph.inputs))
    return result


def _linear(pushed: Model, ports: dict[str, str], tangents: int, moved: int) -> Model:
    result = pushed.copy()
    graph = result.ir.graph
    known = {str(value.name): value for value in values(graph)}
    given = len(graph.inputs) - tangents
    _drop(graph.outputs, 0, len(graph.outputs) - moved)
    op = Builder(graph)
    for name, port in ports.items():
        old = known[name]
        new = input_like(op, old, "residual", name)
        if old.is_graph_output():  # a tangent that depends on no tangent
            index = list(graph.outputs).index(old)
            old.name, title = op.unique(f"{name}/at_point"), name
            graph.outputs[index] = op.Identity(new)
            graph.outputs[index].name = title
        old.replace_all_uses_with(new)
        new.name = port
    remove_dead_code(result.ir)
    _drop(graph.inputs, 0, given)
    return result


def _drop(ports: MutableSequence[ir.Value], start: int, end: int) -> None:
    for _ in range(start, end):  # one by one: a value that a slice takes out goes on to count as a port
        ports.pop(start)
