"""A model as few bytes as it needs: what any runtime finds out by itself is left out."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import onnx
import onnx_ir as ir

from archipel.graph.parameters import NAMES_KEY
from archipel.graph.passes.constants import UNPACK
from archipel.graph.walk import proto_bodies

_OWN = "archipel."


def slim(model: ir.Model) -> onnx.ModelProto:
    """The model without the shapes that inference gives back, the list of its parameters, and others' remarks.

    In a small network these are a tenth of the file. Exporters' metadata tells where somebody's source code lies, and
    runtimes may act on it: bundles hold none.
    """
    proto = ir.to_proto(model)
    graph = proto.graph
    initializers = {tensor.name for tensor in graph.initializer}
    kept = {value.name: value for value in graph.value_info if value.name not in initializers}
    del graph.value_info[:]
    inferred = onnx.shape_inference.infer_shapes(proto, data_prop=True)
    found = {value.name: value.type for value in inferred.graph.value_info}
    graph.value_info.extend(value for name, value in kept.items() if not _is_inferred(found.get(name), value.type))
    own = [key for entry in proto.metadata_props if (key := entry.key).startswith(_OWN) and key != NAMES_KEY]
    _keep_metadata(proto, own)
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
        for each in part:
            _keep_metadata(each)
    _clean_nodes(graph.node)


def _clean_nodes(nodes: Iterable[onnx.NodeProto]) -> None:
    for node in nodes:
        _keep_metadata(node, [UNPACK])
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


def _is_inferred(found: onnx.TypeProto | None, known: onnx.TypeProto) -> bool:
    """Whether inference found the type, and every size that is a number."""
    if found is None or found.tensor_type.elem_type != known.tensor_type.elem_type:
        return False
    sizes, wanted = found.tensor_type.shape.dim, known.tensor_type.shape.dim
    return len(sizes) == len(wanted) and all(
        not want.HasField("dim_value") or size.dim_value == want.dim_value for size, want in zip(sizes, wanted)
    )
