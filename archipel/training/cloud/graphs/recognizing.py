"""Gradients that a program spells out in standard operators, as one node each where PyTorch has a function for them.

A step program holds, for the weight of a convolution, what `autodiff` wrote: windows, products and sums that suit ONNX
Runtime on a CPU. PyTorch has one function for it. What to look for is not written down here: `autodiff.vjp` of the one
node says it, so a changed rule is still recognised.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from archipel.autodiff import vjp
from archipel.errors import ArchipelError
from archipel.graph.model import Model
from archipel.graph.opset import IR_VERSION, OPSET
from archipel.graph.passes import remove_dead_code
from archipel.graph.shapes import constant_array, dims, same_shape
from archipel.graph.walk import levels
from archipel.training.cloud.ops.gradients import DOMAIN

_MOST_TAPS = 25
"""Elements of a window of MaxPool, each of which is a pass over the output."""

_SOUGHT = {"Conv": (1, "ConvWeight"), "MaxPool": (0, "MaxPool"), "Relu": (0, "Relu")}
"""Operator -> the input whose gradient is sought, and the name of the node that stands for it."""


@dataclass(frozen=True)
class _Reference:
    """The gradient of one node as `autodiff` writes it.

    Attributes:
        result: the gradient.
        cotangent: the gradient of the node's output.
        inputs: the node's inputs, in its order.
        output: the node's output; None where the gradient does not read it.
    """

    result: ir.Value
    cotangent: ir.Value
    inputs: tuple[ir.Value | None, ...]
    output: ir.Value | None


def recognize_gradients(model: Model) -> Model:
    """The program with one node of the domain `archipel.gradients` for each gradient that PyTorch computes at once.

    Only `TorchModule` runs such nodes. The model stays as it is; without such a gradient it is returned itself.
    """
    if not any(map(_is_sought, model.ir.graph.all_nodes())):
        return model
    result = model.copy()
    references: dict[object, _Reference | None] = {}
    found = 0
    for graph in levels(result.ir.graph):
        for node in filter(_is_sought, list(graph)):
            found += _replace(graph, node, references)
    if not found:
        return model
    result.ir.opset_imports[DOMAIN] = 1
    result.ir.graph.opset_imports[DOMAIN] = 1
    remove_dead_code(result.ir)
    return result


def _is_sought(node: ir.Node) -> bool:
    if node.op_type not in _SOUGHT or node.domain or len(node.outputs) != 1:
        return False
    return node.op_type != "MaxPool" or math.prod(node.attributes.get_ints("kernel_shape", ())) <= _MOST_TAPS


def _replace(graph: ir.Graph, node: ir.Node, references: dict[object, _Reference | None]) -> int:
    """Put a node in the place of each gradient of `node`. Returns how many."""
    wrt, name = _SOUGHT[node.op_type]
    target, y = node.inputs[wrt], node.outputs[0]
    if target is None or target.shape is None or y.shape is None:
        return 0
    key = _key(node)
    if key not in references:
        references[key] = _refer(node, wrt)
    reference = references[key]
    last = None if reference is None else reference.result.producer()
    if reference is None or last is None:
        return 0
    count = 0
    for candidate in [each for each in graph if each.op_type == last.op_type and each.domain == last.domain]:
        result = candidate.outputs[0]
        if result.shape is None or not same_shape(dims(result), dims(target)):
            continue
        g = _match(reference, result, node)
        if g is None or g.shape is None or not same_shape(dims(g), dims(y)) or g.dtype != y.dtype:
            continue
        given: list[ir.Value | None] = [node.inputs[0], g] if name == "ConvWeight" else [y, g]
        if name == "MaxPool":
            given.insert(0, node.inputs[0])
        made = ir.Node(
            DOMAIN, name, given, [*node.attributes.values()], name=candidate.name,
            outputs=[ir.Value(name=result.name, type=result.type, shape=result.shape)],
        )  # fmt: skip
        graph.insert_before(candidate, made)
        new = made.outputs[0]
        result.replace_all_uses_with(new, replace_graph_outputs=True)
        result.name = f"{result.name}/replaced"
        count += 1
    return count


def _key(node: ir.Node) -> object:
    """Equal for nodes whose gradients are written alike."""
    attributes = sorted((name, str(each.value)) for name, each in node.attributes.items())
    kinds = tuple(None if value is None else (value.dtype, tuple(map(str, dims(value)))) for value in node.inputs)
    return node.op_type, tuple(attributes), kinds


def _refer(node: ir.Node, wrt: int) -> _Reference | None:
    """The gradient of a model of the one node; None where there is none."""
    inputs = [
        None if value is None else ir.Value(name=f"x{i}", type=value.type, shape=value.shape)
        for i, value in enumerate(node.inputs)
    ]
    y = ir.Value(name="y", type=node.outputs[0].type, shape=node.outputs[0].shape)
    alone = ir.Node("", node.op_type, inputs, list(node.attributes.values()), outputs=[y], name="node")
    graph = ir.Graph(
        [value for value in inputs if value is not None], [y], nodes=[alone], opset_imports={"": OPSET}, name="node"
    )
    try:
        gradient = vjp(Model(ir.Model(graph, ir_version=IR_VERSION)), of=["y"], wrt=[f"x{wrt}"]).ir.graph
    except ArchipelError:
        return None
    given = {value.name: value for value in gradient.inputs}
    forward = [each for each in gradient if each.op_type == node.op_type and each.inputs[0] is given.get("x0")]
    results = {value.name: value for value in gradient.outputs}
    cotangent, result = given.get("y.cotangent"), results.get(f"x{wrt}.grad")
    if cotangent is None or result is None:
        return None
    own = tuple(None if value is None else given.get(value.name) for value in inputs)
    return _Reference(result, cotangent, own, results.get("y") or (forward[0].outputs[0] if forward else None))


def _match(reference: _Reference, result: ir.Value, node: ir.Node) -> ir.Value | None:
    """The value that stands for the cotangent, if `result` is the gradient of `node`."""
    bound: dict[ir.Value, ir.Value] = {}
    for ours, theirs in zip(reference.inputs, node.inputs):
        if ours is not None and theirs is not None:
            bound[ours] = theirs
    if reference.output is not None:
        bound[reference.output] = node.outputs[0]
    open_pairs = [(reference.result, result)]
    while open_pairs:
        ours, theirs = open_pairs.pop()
        if ours in bound:
            if bound[ours] is not theirs:
                return None
            continue
        if ours is reference.cotangent:
            bound[ours] = theirs
            continue
        content = constant_array(ours)
        if content is not None:
            other = constant_array(theirs)
            if other is None or not _same(content, other):
                return None
            continue
        first, second = ours.producer(), theirs.producer()
        if first is None or second is None or not _alike(first, second) or ours.index() != theirs.index():
            return None
        bound[ours] = theirs
        for one, other_value in zip(first.inputs, second.inputs):
            if (one is None) != (other_value is None):
                return None
            if one is not None and other_value is not None:
                open_pairs.append((one, other_value))
    return bound.get(reference.cotangent)


def _same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and np.array_equal(a, b)


def _alike(a: ir.Node, b: ir.Node) -> bool:
    """Whether two nodes do the same with their inputs."""
    if (a.domain, a.op_type, len(a.inputs)) != (b.domain, b.op_type, len(b.inputs)):
        return False
    return _settings(a.attributes.values()) == _settings(b.attributes.values())


def _settings(attributes: Iterable[ir.Attr]) -> dict[str, str]:
    return {each.name: str(each.value) for each in attributes}
