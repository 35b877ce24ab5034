/**
 * Other values for a graph's initializers, by rewriting the serialized model where it names them.
 *
 * ONNX Runtime Web takes external data as files only, so the new values become a second file, and the initializers'
 * entries (ModelProto.graph.initializer, TensorProto) point into it. The weights that all programs share stay as they
 * are. Format: onnx.proto3, and Protocol Buffers' encoding of fields as tag, length and bytes.
 */

import { bytesOf, type NdArray } from "../arrays.js";
import type { DType } from "../bundle/roles.js";
import { RuntimeProgramError } from "../errors.js";

/** The name of the second file. It cannot be a bundle's: those start with a letter or a digit. */
export const DERIVED_FILE = "_derived";

const MODEL_GRAPH = 7;
const GRAPH_INITIALIZER = 5;
const TENSOR_DIMS = 1;
const TENSOR_DATA_TYPE = 2;
const TENSOR_NAME = 8;
const TENSOR_EXTERNAL_DATA = 13;
const TENSOR_DATA_LOCATION = 14;
const ENTRY_KEY = 1;
const ENTRY_VALUE = 2;
const EXTERNAL = 1;

const VARINT = 0;
const FIXED64 = 1;
const BYTES = 2;
const FIXED32 = 5;

const DATA_TYPES: Readonly<Record<DType, number>> = {
  float32: 1,
  uint8: 2,
  int8: 3,
  uint16: 4,
  int16: 5,
  int32: 6,
  int64: 7,
  bool: 9,
  float16: 10,
  float64: 11,
  uint32: 12,
  uint64: 13,
};

interface Rewritten {
  readonly graph: Uint8Array;
  readonly data: Uint8Array;
}

/** The model with new values for `values` by name, and the file `DERIVED_FILE`. Raises RuntimeProgramError. */
export function replaceInitializers(
  program: string,
  model: Uint8Array,
  values: ReadonlyMap<string, NdArray>,
): Rewritten {
  if (!values.size) return { graph: model, data: new Uint8Array() };
  const offsets = new Map<string, number>();
  let bytes = 0;
  for (const [name, array] of values) {
    offsets.set(name, bytes);
    bytes += Math.ceil(array.data.byteLength / 16) * 16;
  }
  const data = new Uint8Array(bytes);
  for (const [name, array] of values) data.set(bytesOf(array), offsets.get(name));

  const found = new Set<string>();
  const inGraph = (tensor: Uint8Array): Uint8Array => {
    const name = nameOf(tensor);
    const array = values.get(name);
    if (array === undefined) return tensor;
    found.add(name);
    return externalTensor(name, array, offsets.get(name) ?? 0);
  };
  let graph: Uint8Array;
  try {
    graph = rewrite(model, MODEL_GRAPH, (part) => rewrite(part, GRAPH_INITIALIZER, inGraph));
  } catch (error) {
    if (!(error instanceof RangeError)) throw error;
    throw new RuntimeProgramError(`program ${program}: its graph cannot be read (${error.message})`);
  }
  const missing = [...values.keys()].filter((name) => !found.has(name));
  if (missing.length) {
    throw new RuntimeProgramError(
      `program ${program}: its graph has no initializer ${missing.join(", ")}, which refresh derives; convert it again`,
    );
  }
  return { graph, data };
}

function externalTensor(name: string, array: NdArray, offset: number): Uint8Array {
  const parts = [
    ...array.dims.map((dim) => varintField(TENSOR_DIMS, dim)),
    varintField(TENSOR_DATA_TYPE, DATA_TYPES[array.dtype as DType]),
    bytesField(TENSOR_NAME, utf8(name)),
  ];
  const entries = { location: DERIVED_FILE, offset: String(offset), length: String(array.data.byteLength) };
  for (const [key, value] of Object.entries(entries)) {
    const entry = joined([bytesField(ENTRY_KEY, utf8(key)), bytesField(ENTRY_VALUE, utf8(value))]);
    parts.push(bytesField(TENSOR_EXTERNAL_DATA, entry));
  }
  return joined([...parts, varintField(TENSOR_DATA_LOCATION, EXTERNAL)]);
}

/** The message with every field `number` replaced by what `change` makes of it, everything else as it was. */
function rewrite(message: Uint8Array, number: number, change: (part: Uint8Array) => Uint8Array): Uint8Array {
  const parts: Uint8Array[] = [];
  for (const field of fieldsOf(message)) {
    parts.push(field.number === number && field.body ? bytesField(number, change(field.body)) : field.raw);
  }
  return joined(parts);
}

function nameOf(tensor: Uint8Array): string {
  let name = "";
  for (const field of fieldsOf(tensor)) {
    if (field.number === TENSOR_NAME && field.body) name = new TextDecoder().decode(field.body);
  }
  return name;
}

interface Field {
  readonly number: number;
  /** With its tag. */
  readonly raw: Uint8Array;
  /** Of a field with a length; null for numbers. */
  readonly body: Uint8Array | null;
}

function* fieldsOf(message: Uint8Array): Generator<Field> {
  let at = 0;
  const varint = (): number => {
    let value = 0;
    for (let scale = 1; ; scale *= 128) {
      const byte = message[at++];
      if (byte === undefined || scale > 2 ** 63) throw new RangeError("a number is cut short");
      value += (byte & 0x7f) * scale;
      if (byte < 0x80) return value;
    }
  };
  while (at < message.length) {
    const start = at;
    const tag = varint();
    let body: Uint8Array | null = null;
    switch (tag % 8) {
      case VARINT:
        varint();
        break;
      case FIXED64:
        at += 8;
        break;
      case FIXED32:
        at += 4;
        break;
      case BYTES: {
        const length = varint();
        if (length > message.length - at) throw new RangeError("a field is longer than its message");
        body = message.subarray(at, at + length);
        at += length;
        break;
      }
      default:
        throw new RangeError(`unknown wire type ${tag % 8}`);
    }
    if (at > message.length) throw new RangeError("a field is longer than its message");
    yield { number: Math.floor(tag / 8), raw: message.subarray(start, at), body };
  }
}

function varintBytes(value: number): number[] {
  const bytes: number[] = [];
  let rest = value;
  for (; rest >= 128; rest = Math.floor(rest / 128)) bytes.push((rest % 128) | 0x80);
  bytes.push(rest);
  return bytes;
}

function varintField(number: number, value: number): Uint8Array {
  return Uint8Array.from([...varintBytes(number * 8 + VARINT), ...varintBytes(value)]);
}

function bytesField(number: number, body: Uint8Array): Uint8Array {
  return joined([Uint8Array.from([...varintBytes(number * 8 + BYTES), ...varintBytes(body.length)]), body]);
}

function utf8(text: string): Uint8Array {
  return new TextEncoder().encode(text);
}

function joined(parts: readonly Uint8Array[]): Uint8Array {
  const all = new Uint8Array(parts.reduce((length, part) => length + part.length, 0));
  let at = 0;
  for (const part of parts) {
    all.set(part, at);
    at += part.length;
  }
  return all;
}
