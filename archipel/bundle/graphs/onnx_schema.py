"""ONNX's messages as tables of fields: number, name, wire type. Source: onnx/onnx.proto, IR version 10 to 13.

Lists of numbers are packed where onnx.proto says so and have one field per number elsewhere, as the official library
writes them. A known field that no bundle needs has the reason why it is refused.
"""

from __future__ import annotations

from archipel.bundle.graphs.wire import BYTES, FIXED32, VARINT, Field, Table

_NO_TRAINING = "training information is not part of a bundle's graphs; a train program is a graph of its own"
_NO_SPARSE = "sparse tensors are not part of bundles; store the tensor dense, in the weights file"
_NO_DEVICES = "the graph may not choose devices; delegates are for the device's owner to choose"
_NO_QUANTIZATION = "quantization annotations are not part of bundles; quantize with operators"


def _table(**fields: tuple[int, int] | tuple[int, int, bool] | tuple[int, int, bool, str]) -> Table:
    # Keyed by the tag as it stands in the file, so that a field of another wire type is unknown at once.
    entries = {}
    for name, (number, wire, *rest) in fields.items():
        entries[number * 8 + wire] = Field(name, wire, *rest)
    return entries


_MANY = True

MODEL = _table(
    ir_version=(1, VARINT),
    producer_name=(2, BYTES),
    producer_version=(3, BYTES),
    domain=(4, BYTES),
    model_version=(5, VARINT),
    doc_string=(6, BYTES),
    graph=(7, BYTES),
    opset_import=(8, BYTES, _MANY),
    metadata_props=(14, BYTES, _MANY),
    training_info=(20, BYTES, _MANY, _NO_TRAINING),
    functions=(25, BYTES, _MANY),
    configuration=(26, BYTES, _MANY, _NO_DEVICES),
)
OPSET_IMPORT = _table(domain=(1, BYTES), version=(2, VARINT))
ENTRY = _table(key=(1, BYTES), value=(2, BYTES))
GRAPH = _table(
    node=(1, BYTES, _MANY),
    name=(2, BYTES),
    initializer=(5, BYTES, _MANY),
    doc_string=(10, BYTES),
    input=(11, BYTES, _MANY),
    output=(12, BYTES, _MANY),
    value_info=(13, BYTES, _MANY),
    quantization_annotation=(14, BYTES, _MANY, _NO_QUANTIZATION),
    sparse_initializer=(15, BYTES, _MANY, _NO_SPARSE),
    metadata_props=(16, BYTES, _MANY),
)
FUNCTION = _table(
    name=(1, BYTES),
    input=(4, BYTES, _MANY),
    output=(5, BYTES, _MANY),
    attribute=(6, BYTES, _MANY),
    node=(7, BYTES, _MANY),
    doc_string=(8, BYTES),
    opset_import=(9, BYTES, _MANY),
    domain=(10, BYTES),
    attribute_proto=(11, BYTES, _MANY),
    value_info=(12, BYTES, _MANY),
    overload=(13, BYTES),
    metadata_props=(14, BYTES, _MANY),
)
NODE = _table(
    input=(1, BYTES, _MANY),
    output=(2, BYTES, _MANY),
    name=(3, BYTES),
    op_type=(4, BYTES),
    attribute=(5, BYTES, _MANY),
    doc_string=(6, BYTES),
    domain=(7, BYTES),
    overload=(8, BYTES),
    metadata_props=(9, BYTES, _MANY),
    device_configurations=(10, BYTES, _MANY, _NO_DEVICES),
)
ATTRIBUTE = _table(
    name=(1, BYTES),
    f=(2, FIXED32),
    i=(3, VARINT),
    s=(4, BYTES),
    t=(5, BYTES),
    g=(6, BYTES),
    floats=(7, FIXED32, _MANY),
    ints=(8, VARINT, _MANY),
    strings=(9, BYTES, _MANY),
    tensors=(10, BYTES, _MANY),
    graphs=(11, BYTES, _MANY),
    doc_string=(13, BYTES),
    tp=(14, BYTES),
    type_protos=(15, BYTES, _MANY),
    type=(20, VARINT),
    ref_attr_name=(21, BYTES),
    sparse_tensor=(22, BYTES, False, _NO_SPARSE),
    sparse_tensors=(23, BYTES, _MANY, _NO_SPARSE),
)
TENSOR = _table(
    dims=(1, VARINT, _MANY),
    data_type=(2, VARINT),
    segment=(3, BYTES, False, "tensors in segments are not part of bundles"),
    float_data=(4, BYTES),
    int32_data=(5, BYTES),
    string_data=(6, BYTES, _MANY),
    int64_data=(7, BYTES),
    name=(8, BYTES),
    raw_data=(9, BYTES),
    double_data=(10, BYTES),
    uint64_data=(11, BYTES),
    doc_string=(12, BYTES),
    external_data=(13, BYTES, _MANY),
    data_location=(14, VARINT),
    metadata_props=(16, BYTES, _MANY),
)
VALUE_INFO = _table(name=(1, BYTES), type=(2, BYTES), doc_string=(3, BYTES), metadata_props=(4, BYTES, _MANY))
TYPE = _table(
    tensor_type=(1, BYTES),
    sequence_type=(4, BYTES),
    map_type=(5, BYTES, False, "maps are not part of bundles"),
    denotation=(6, BYTES),
    opaque_type=(7, BYTES, False, "opaque types are not part of bundles"),
    sparse_tensor_type=(8, BYTES, False, _NO_SPARSE),
    optional_type=(9, BYTES),
)
TENSOR_TYPE = _table(elem_type=(1, VARINT), shape=(2, BYTES))
ELEMENT_TYPE = _table(elem_type=(1, BYTES))
SHAPE = _table(dim=(1, BYTES, _MANY))
DIMENSION = _table(dim_value=(1, VARINT), dim_param=(2, BYTES), denotation=(3, BYTES))

ATTRIBUTE_VALUES: dict[int, str] = {
    1: "f", 2: "i", 3: "s", 4: "t", 5: "g", 6: "floats", 7: "ints", 8: "strings", 9: "tensors", 10: "graphs",
    13: "tp", 14: "type_protos",
}  # fmt: skip
"""The field that has the value, by AttributeProto.type."""

STRING = 8
EXTERNAL = 1
"""TensorProto.data_type of strings, and its data_location for bytes in another file."""

DATA_TYPES: dict[int, tuple[int, str]] = {
    1: (32, "float_data"), 2: (8, "int32_data"), 3: (8, "int32_data"), 4: (16, "int32_data"), 5: (16, "int32_data"),
    6: (32, "int32_data"), 7: (64, "int64_data"), STRING: (0, "string_data"), 9: (8, "int32_data"),
    10: (16, "int32_data"), 11: (64, "double_data"), 12: (32, "uint64_data"), 13: (64, "uint64_data"),
    16: (16, "int32_data"), 17: (8, "int32_data"), 18: (8, "int32_data"), 19: (8, "int32_data"), 20: (8, "int32_data"),
    21: (4, "int32_data"), 22: (4, "int32_data"),
}  # fmt: skip
"""By TensorProto.data_type: bits of an element, and the field that has the values where `raw_data` does not."""
