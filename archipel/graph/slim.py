"""A model as few bytes as it needs: what any runtime finds out by itself is left out."""

from __future__ import annotations

from collections.abc import Collection

import onnx
import onnx_ir as ir

from archipel.graph.parameters import NAMES_KEY
from archipel.graph.passes.constants import UNPACK


def slim(model: ir.Model) -> onnx.ModelProto:
    """The model without the shapes that inference gives back, and without the list of its parameters.

    In a small network these are a tenth of the file.
    """
    proto = ir.to_proto(model)
    graph = proto.graph
    initializers = {tensor.name for tensor in graph.initializer}
    kept = {value.name: value for value in graph.value_info if value.name not in initializers}
    del graph.value_info[:]
    inferred = onnx.shape_inference.infer_shapes(proto, data_prop=True)
    found = {value.name: value.type for value in inferred.graph.value_info}
    graph.value_info.extend(value for name, value in kept.items() if not _as_much(found.get(name), value.type))
    _keep_metadata(proto, [entry.key for entry in proto.metadata_props if entry.key != NAMES_KEY])
    for node in graph.node:
        _keep_metadata(node, [UNPACK])
    return proto


def _keep_metadata(owner: onnx.ModelProto | onnx.NodeProto, keys: Collection[str]) -> None:
    kept = [entry for entry in owner.metadata_props if entry.key in keys]
    del owner.metadata_props[:]
    owner.metadata_props.extend(kept)


def _as_much(found: onnx.TypeProto | None, known: onnx.TypeProto) -> bool:
    """Whether inference found the type, and every size that is a number."""
    if found is None or found.tensor_type.elem_type != known.tensor_type.elem_type:
        return False
    sizes, wanted = found.tensor_type.shape.dim, known.tensor_type.shape.dim
    return len(sizes) == len(wanted) and all(
        not want.HasField("dim_value") or size.dim_value == want.dim_value for size, want in zip(sizes, wanted)
    )
