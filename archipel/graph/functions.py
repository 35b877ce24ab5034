"""Model-local functions: inlined at import, except those with a gradient rule of their own."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable

import onnx
import onnx.inliner
import onnx_ir as ir
import onnx_ir.passes.common as common

from archipel.errors import GraphError, ModelImportError
from archipel.graph.markers import MARKERS
from archipel.graph.opset import OPSET, difference, opset_of, stamp, standard_nodes
from archipel.graph.walk import proto_nodes

Name = tuple[str, str]
"""Domain and operator."""

KEPT: set[Name] = set(MARKERS)
"""Functions that an import does not inline. `autodiff.rule` adds to it."""

MAX_NODES = 200_000
"""Limit of nodes after inlining: functions that each call the next one twice double the number with every function."""

MAX_DEPTH = 64
"""Limit of functions that call functions: onnx's inliner recurses, and would overflow the stack."""

_INLINED = "archipel.inlined_functions"


def refuse_too_many(proto: onnx.ModelProto) -> None:
    """Raise ModelImportError for more nodes than MAX_NODES after inlining, and for functions that call each other in a
    circle or too deeply. Counts before anything is inlined."""
    bodies = {(_name(function), function.overload): list(proto_nodes(function.node)) for function in proto.functions}
    sizes: dict[tuple[Name, str], tuple[int, int]] = {}  # nodes, depth

    def total(nodes: list[onnx.NodeProto]) -> tuple[int, int]:
        costs = [sizes.get(_called(node), (1, 0)) for node in nodes]
        return sum(count for count, _ in costs), max((depth for _, depth in costs), default=0)

    # Depth first with a stack of its own, since recursion is what the limit is to prevent: a function is counted once
    # all that it calls are. One that comes up again before that calls itself.
    waiting, entered = list(bodies), set()
    while waiting:
        key = waiting[-1]
        missing = {_called(node) for node in bodies[key]} & (bodies.keys() - sizes.keys())
        if key in sizes or not missing:
            count, depth = total(bodies[key])
            sizes[key] = (count, depth + 1)
            entered.discard(key)
            waiting.pop()
            if depth >= MAX_DEPTH:
                raise ModelImportError(f"functions call functions more than {MAX_DEPTH} deep, at {'.'.join(key[0])}")
        elif key in entered:
            raise ModelImportError(f"the function {'.'.join(key[0])} calls itself, directly or through others")
        else:
            entered.add(key)
            waiting.extend(sorted(missing))
    count, _ = total(list(proto_nodes(proto.graph.node)))
    if count > MAX_NODES:
        raise ModelImportError(
            f"the model has {count} nodes with its functions inlined; at most {MAX_NODES} are supported"
        )


def share_opset(proto: onnx.ModelProto) -> None:
    """Set every function's opset to the model's, as the checker and the inliner require. Changes `proto`.

    Raises ModelImportError for a function with an operator that means something else in that opset.
    """
    version = opset_of(proto.opset_import)
    for function in proto.functions:
        _set_opset(function, version)


def inline_unknown(proto: onnx.ModelProto) -> tuple[onnx.ModelProto, list[onnx.FunctionProto], set[Name]]:
    """Inline every function except those in KEPT.

    Returns the model without function definitions, the kept functions with opset OPSET, and the names of those inlined.
    Raises ModelImportError for a kept function with an operator that means something else in OPSET.
    """
    names = {_name(function) for function in proto.functions} - KEPT
    if names:
        proto = onnx.inliner.inline_selected_functions(proto, sorted(names))
    kept = list(proto.functions)
    if kept:
        proto = onnx.shape_inference.infer_shapes(
            proto
        )  # their results' types can be inferred only while their definitions are there
    for function in kept:
        _set_opset(function, OPSET)
    del proto.functions[:]
    return proto, kept, names


def record_inlined(graph: ir.Graph, names: Iterable[Name]) -> None:
    """Remember which functions an import inlined."""
    if names:
        # In the metadata, where `autodiff.registry.require_kept` looks before it differentiates the graph.
        graph.metadata_props[_INLINED] = json.dumps(sorted(names))


def inlined_functions(graph: ir.Graph) -> set[Name]:
    """The functions that were inlined when the graph was imported. Raises GraphError for a damaged record."""
    try:
        return {(str(domain), str(op_type)) for domain, op_type in json.loads(graph.metadata_props.get(_INLINED, "[]"))}
    except (TypeError, ValueError, RecursionError) as error:
        raise GraphError(f"the record of inlined functions is damaged ({error}); export the model again") from None


def inline_functions(model: ir.Model, keep: Collection[Name] = ()) -> None:
    """Inline the functions that the import kept, so that only standard operators remain, but for those in `keep`.
    Changes `model`."""
    if all((domain, name) in keep for domain, name, _ in model.functions):
        return
    common.InlinePass(lambda function: (function.domain, function.name) not in keep)(model)
    common.NameFixPass()(model)
    common.ShapeInferencePass(check_type=False, strict_mode=True, data_prop=True)(model)


def _set_opset(function: onnx.FunctionProto, version: int) -> None:
    own = opset_of(function.opset_import)
    for node in standard_nodes(function.node):
        change = difference(node, own, version)
        if change is not None:
            raise ModelImportError(
                f"function {function.domain}.{function.name} (opset {own}): {node.op_type} {node.name!r} {change}; "
                f"export the model and its functions at opset {OPSET}"
            )
    stamp(function.opset_import, version)


def _called(node: onnx.NodeProto) -> tuple[Name, str]:
    return (node.domain, node.op_type), node.overload


def _name(function: onnx.FunctionProto) -> Name:
    return function.domain, function.name
