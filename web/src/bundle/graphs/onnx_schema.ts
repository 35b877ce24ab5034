/**
 * ONNX's messages as tables of fields: number, name, wire type. The same as archipel/bundle/graphs/onnx_schema.py; a
 * test of the Python package compares the two. Source: onnx/onnx.proto, IR version 10 to 13.
 */

import { BYTES, type Field, FIXED32, type Table, VARINT } from "./wire.js";

const NO_TRAINING =
  "training information is not part of a bundle's graphs; a train program is a graph of its own";
const NO_SPARSE =
  "sparse tensors are not part of bundles; store the tensor dense, in the weights file";
const NO_DEVICES =
  "the graph may not choose devices; delegates are for the device's owner to choose";
const NO_QUANTIZATION =
  "quantization annotations are not part of bundles; quantize with operators";

type Entry = readonly [number: number, wire: number, repeated?: boolean, refused?: string];

function table(fields: Readonly<Record<string, Entry>>): Table {
  const entries = Object.entries(fields).map(([name, [number, wire, repeated = false, refused = ""]]) => {
    const field: Field = { name, wire, repeated, refused };
    return [number * 8 + wire, field] as const;
  });
  return new Map(entries);
}

const MANY = true;

export const MODEL = table({
  ir_version: [1, VARINT],
  producer_name: [2, BYTES],
  producer_version: [3, BYTES],
  domain: [4, BYTES],
  model_version: [5, VARINT],
  doc_string: [6, BYTES],
  graph: [7, BYTES],
  opset_import: [8, BYTES, MANY],
  metadata_props: [14, BYTES, MANY],
  training_info: [20, BYTES, MANY, NO_TRAINING],
  functions: [25, BYTES, MANY],
  configuration: [26, BYTES, MANY, NO_DEVICES],
});
export const OPSET_IMPORT = table({
  domain: [1, BYTES],
  version: [2, VARINT],
});
export const ENTRY = table({
  key: [1, BYTES],
  value: [2, BYTES],
});
export const GRAPH = table({
  node: [1, BYTES, MANY],
  name: [2, BYTES],
  initializer: [5, BYTES, MANY],
  doc_string: [10, BYTES],
  input: [11, BYTES, MANY],
  output: [12, BYTES, MANY],
  value_info: [13, BYTES, MANY],
  quantization_annotation: [14, BYTES, MANY, NO_QUANTIZATION],
  sparse_initializer: [15, BYTES, MANY, NO_SPARSE],
  metadata_props: [16, BYTES, MANY],
});
export const FUNCTION = table({
  name: [1, BYTES],
  input: [4, BYTES, MANY],
  output: [5, BYTES, MANY],
  attribute: [6, BYTES, MANY],
  node: [7, BYTES, MANY],
  doc_string: [8, BYTES],
  opset_import: [9, BYTES, MANY],
  domain: [10, BYTES],
  attribute_proto: [11, BYTES, MANY],
  value_info: [12, BYTES, MANY],
  overload: [13, BYTES],
  metadata_props: [14, BYTES, MANY],
});
export const NODE = table({
  input: [1, BYTES, MANY],
  output: [2, BYTES, MANY],
  name: [3, BYTES],
  op_type: [4, BYTES],
  attribute: [5, BYTES, MANY],
  doc_string: [6, BYTES],
  domain: [7, BYTES],
  overload: [8, BYTES],
  metadata_props: [9, BYTES, MANY],
  device_configurations: [10, BYTES, MANY, NO_DEVICES],
});
export const ATTRIBUTE = table({
  name: [1, BYTES],
  f: [2, FIXED32],
  i: [3, VARINT],
  s: [4, BYTES],
  t: [5, BYTES],
  g: [6, BYTES],
  floats: [7, FIXED32, MANY],
  ints: [8, VARINT, MANY],
  strings: [9, BYTES, MANY],
  tensors: [10, BYTES, MANY],
  graphs: [11, BYTES, MANY],
  doc_string: [13, BYTES],
  tp: [14, BYTES],
  type_protos: [15, BYTES, MANY],
  type: [20, VARINT],
  ref_attr_name: [21, BYTES],
  sparse_tensor: [22, BYTES, false, NO_SPARSE],
  sparse_tensors: [23, BYTES, MANY, NO_SPARSE],
});
export const TENSOR = table({
  dims: [1, VARINT, MANY],
  data_type: [2, VARINT],
  segment: [3, BYTES, false, "tensors in segments are not part of bundles"],
  float_data: [4, BYTES],
  int32_data: [5, BYTES],
  string_data: [6, BYTES, MANY],
  int64_data: [7, BYTES],
  name: [8, BYTES],
  raw_data: [9, BYTES],
  double_data: [10, BYTES],
  uint64_data: [11, BYTES],
  doc_string: [12, BYTES],
  external_data: [13, BYTES, MANY],
  data_location: [14, VARINT],
  metadata_props: [16, BYTES, MANY],
});
export const VALUE_INFO = table({
  name: [1, BYTES],
  type: [2, BYTES],
  doc_string: [3, BYTES],
  metadata_props: [4, BYTES, MANY],
});
export const TYPE = table({
  tensor_type: [1, BYTES],
  sequence_type: [4, BYTES],
  map_type: [5, BYTES, false, "maps are not part of bundles"],
  denotation: [6, BYTES],
  opaque_type: [7, BYTES, false, "opaque types are not part of bundles"],
  sparse_tensor_type: [8, BYTES, false, NO_SPARSE],
  optional_type: [9, BYTES],
});
export const TENSOR_TYPE = table({
  elem_type: [1, VARINT],
  shape: [2, BYTES],
});
export const ELEMENT_TYPE = table({
  elem_type: [1, BYTES],
});
export const SHAPE = table({
  dim: [1, BYTES, MANY],
});
export const DIMENSION = table({
  dim_value: [1, VARINT],
  dim_param: [2, BYTES],
  denotation: [3, BYTES],
});

/** AttributeProto.type, and the field that then holds the value. */
export const ATTRIBUTE_VALUES: ReadonlyMap<number, string> = new Map([
  [1, "f"],
  [2, "i"],
  [3, "s"],
  [4, "t"],
  [5, "g"],
  [6, "floats"],
  [7, "ints"],
  [8, "strings"],
  [9, "tensors"],
  [10, "graphs"],
  [13, "tp"],
  [14, "type_protos"],
]);

/** TensorProto.data_type of strings, and its data_location for bytes in another file. */
export const STRING = 8;
export const EXTERNAL = 1;

/** TensorProto.data_type: bits of an element, and the field that holds its values where `raw_data` does not. */
export const DATA_TYPES: ReadonlyMap<number, readonly [bits: number, typed: string]> = new Map([
  [1, [32, "float_data"]],
  [2, [8, "int32_data"]],
  [3, [8, "int32_data"]],
  [4, [16, "int32_data"]],
  [5, [16, "int32_data"]],
  [6, [32, "int32_data"]],
  [7, [64, "int64_data"]],
  [8, [0, "string_data"]],
  [9, [8, "int32_data"]],
  [10, [16, "int32_data"]],
  [11, [64, "double_data"]],
  [12, [32, "uint64_data"]],
  [13, [64, "uint64_data"]],
  [16, [16, "int32_data"]],
  [17, [8, "int32_data"]],
  [18, [8, "int32_data"]],
  [19, [8, "int32_data"]],
  [20, [8, "int32_data"]],
  [21, [4, "int32_data"]],
  [22, [4, "int32_data"]],
]);
