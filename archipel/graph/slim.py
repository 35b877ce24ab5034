"""A model as few bytes as it needs: what any runtime finds out by itself is left out."""

from __future__ import annotations

import onnx
import onnx_ir as ir

from archipel.graph.parameters import NAMES_KEY


def slim(model: ir.Model) -> onnx.ModelProto:
    """The model without the shapes that inference gives back, and without the list of its parameters.

    In a small network with long names these are a tenth of the file.
    """
    proto = ir.to_proto(model)
    kept = {value.name: value for value in proto.graph.value_info}
    del proto.graph.value_info[:]
    inferred = onnx.shape_inference.infer_shapes(proto, data_prop=True)
    found = {value.name: value.type for value in inferred.graph.value_info}
    proto.graph.value_info.extend(
        value for name, value in kept.items() if not _as_much(found.get(name), value.type)
    )
    metadata = [entry for entry in proto.metadata_props if entry.key != NAMES_KEY]
    del proto.metadata_props[:]
    proto.metadata_props.extend(metadata)
    return proto


def _as_much(found: onnx.TypeProto | None, known: onnx.TypeProto) -> bool:
    """Whether inference found the type, and every size that is a number."""
    if found is None or found.tensor_type.elem_type != known.tensor_type.elem_type:
        return False
    sizes, wanted = found.tensor_type.shape.dim, known.tensor_type.shape.dim
    return len(sizes) == len(wanted) and all(
        not want.HasField("dim_value") or size.dim_value == want.dim_value for size, want in zip(sizes, wanted)
    )
