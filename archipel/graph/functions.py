"""Model-local functions: inlined at import, but for those that somebody has a gradient rule for."""

from __future__ import annotations

import json
from collections.abc import Iterable

import onnx
import onnx.inliner
import onnx_ir as ir
import onnx_ir.passes.common as common

from archipel.errors import ModelImportError
from archipel.graph.opset import OPSET, difference, opset_of, stamp, standard_nodes

Name = tuple[str, str]
"""Domain and operator."""

KEPT: set[Name] = set()
"""Functions that an import leaves as they are. `autodiff.rule` adds to it."""

_INLINED = "archipel.inlined_functions"


def share_opset(proto: onnx.ModelProto) -> None:
    """Bring every function to the model's opset, as the checker and the inliner want it. Changes `proto`.

    Raises ModelImportError for a function with an operator that means something else there.
    """
    version = opset_of(proto.opset_import)
    for function in proto.functions:
        _restamp(function, version)


def inline_unknown(proto: onnx.ModelProto) -> tuple[onnx.ModelProto, list[onnx.FunctionProto], set[Name]]:
    """Inline every function but those in KEPT: the model without functions, those kept, and the names of the others.

    What is kept is brought to OPSET. Raises ModelImportError for a function whose operators cannot come along.
    """
    names = {_name(function) for function in proto.functions} - KEPT
    if names:
        proto = onnx.inliner.inline_selected_functions(proto, sorted(names))
    kept = list(proto.functions)
    if kept:
        proto = onnx.shape_inference.infer_shapes(proto)  # while the types that they return can be found out
    for function in kept:
        _restamp(function, OPSET)
    del proto.functions[:]
    return proto, kept, names


def record_inlined(graph: ir.Graph, names: Iterable[Name]) -> None:
    """Remember which functions an import inlined."""
    if names:
        graph.metadata_props[_INLINED] = json.dumps(sorted(names))


def inlined_functions(graph: ir.Graph) -> set[Name]:
    """The functions that were inlined when the graph was imported."""
    return {(domain, op_type) for domain, op_type in json.loads(graph.metadata_props.get(_INLINED, "[]"))}


def inline_functions(model: ir.Model) -> None:
    """Inline the functions that the import kept, so that standard operators remain. Changes `model`."""
    if not model.functions:
        return
    common.InlinePass()(model)
    common.NameFixPass()(model)
    common.ShapeInferencePass(check_type=False, strict_mode=True, data_prop=True)(model)


def _restamp(function: onnx.FunctionProto, version: int) -> None:
    own = opset_of(function.opset_import)
    for node in standard_nodes(function.node):
        found = difference(node, own, version)
        if found is not None:
            raise ModelImportError(
                f"function {function.domain}.{function.name} (opset {own}): {node.op_type} {node.name!r} {found}; "
                f"export the model and its functions at opset {OPSET}"
            )
    stamp(function.opset_import, version)


def _name(function: onnx.FunctionProto) -> Name:
    return function.domain, function.name
