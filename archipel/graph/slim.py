"""A model in as few bytes as possible: without what any runtime infers by itself."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import onnx
import onnx_ir as ir

from archipel.graph.model_card import CARD_KEY
from archipel.graph.parameters import FIXED_KEY, NAMES_KEY, STATE_KEY
from archipel.graph.passes.constants import AUGMENTS, EXACT, UNPACK
from archipel.graph.walk import proto_bodies

_OWN = "archipel."
_LISTS = (NAMES_KEY, STATE_KEY, FIXED_KEY)


def slim(model: ir.Model, lists: bool = False, card: bool = False) -> onnx.ModelProto:
    """The model without shapes that inference can restore, the list of its parameters, its card, and other tools'
    metadata.

    In a small network these are a tenth of the file. Exporters' metadata contains paths of somebody's source code, and
    runtimes may act on it, so bundles have none. `lists`: keep the list of parameters, and what the source's state has
    beside them. `card`: keep the card, which a bundle has once, in a file of its own.
    """
    proto = ir.to_proto(model)
    graph = proto.graph
    # An initializer has its shape itself.
    initializers = {tensor.name for tensor in graph.initializer}
    kept = {value.name: value for value in graph.value_info if value.name not in initializers}
    del graph.value_info[:]
    inferred = onnx.shape_inference.infer_shapes(proto, data_prop=True)
    # Inference ran on the model without shapes: what it finds is what a runtime finds. Only the rest is written back.
    types = {value.name: value.type for value in inferred.graph.value_info}
    graph.value_info.extend(value for name, value in kept.items() if not _is_inferred(types.get(name), value.type))
    own = [key for entry in proto.metadata_props if (key := entry.key).startswith(_OWN)]
    dropped = (() if lists else _LISTS) + (() if card else (CARD_KEY,))
    _keep_metadata(proto, [key for key in own if key not in dropped])
    _clean(graph)
    for function in proto.functions:
        _keep_metadata(function)
        _clean_nodes(function.node)
        for value in function.value_info:
            _keep_metadata(value)
    return proto


def _clean(graph: onnx.GraphProto) -> None:
    _keep_metadata(graph)
    del graph.quantization_annotation[:]
    for part in (graph.input, graph.output, graph.value_info, graph.initializer):
        for owner in part:
            _keep_metadata(owner)
    _clean_nodes(graph.node)


def _clean_nodes(nodes: Iterable[onnx.NodeProto]) -> None:
    for node in nodes:
        _keep_metadata(node, [UNPACK, EXACT, AUGMENTS])
        for attribute in node.attribute:
            for tensor in [attribute.t] if attribute.HasField("t") else attribute.tensors:
                _keep_metadata(tensor)
        for body in proto_bodies(node):
            _clean(body)


def _keep_metadata(owner: Any, keys: Collection[str] = ()) -> None:
    if owner.metadata_props:
        kept = [entry for entry in owner.metadata_props if entry.key in keys]
        del owner.metadata_props[:]
        owner.metadata_props.extend(kept)


def _is_inferred(inferred: onnx.TypeProto | None, known: onnx.TypeProto) -> bool:
    """Whether inference gives the same element type and every size that is a number; names of sizes may be lost."""
    if inferred is None or inferred.tensor_type.elem_type != known.tensor_type.elem_type:
        return False
    sizes, wanted = inferred.tensor_type.shape.dim, known.tensor_type.shape.dim
    return len(sizes) == len(wanted) and all(
        not want.HasField("dim_value") or size.dim_value == want.dim_value for size, want in zip(sizes, wanted)
    )
