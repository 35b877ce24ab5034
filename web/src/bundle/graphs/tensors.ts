/** Tensors inside graphs: bytes that fit dtype and shape, in the graph itself or within the bundle's weights file. */

import { UnsafeGraphError } from "../../errors.js";
import { MAX_TENSOR_BYTES } from "../validation.js";
import { DATA_TYPES, ENTRY, EXTERNAL, STRING } from "./onnx_schema.js";
import type { Message, Reader, Span } from "./wire.js";

export const MAX_RANK = 16;
const EXTERNAL_KEYS = ["length", "location", "offset"];
const TYPED = ["float_data", "int32_data", "int64_data", "double_data", "uint64_data", "string_data"];
const NUMBER = /^(?:0|[1-9][0-9]{0,18})$/;

/** The only file that a graph may refer to, and its size in bytes. */
export interface WeightsFile {
  readonly name: string;
  readonly bytes: number;
}

/** Raises UnsafeGraphError or WireError. `tensor` is a TensorProto as it was read. */
export function checkTensor(reader: Reader, tensor: Message, where: string, weights: WeightsFile): void {
  const dataType = tensor.number("data_type");
  const known = DATA_TYPES.get(dataType);
  if (known === undefined) throw new UnsafeGraphError(`${where}: data type ${dataType} is not one that bundles have`);
  const [bits, typed] = known;
  const count = elements(tensor.numbersOf("dims"), where);
  const bytes = Math.ceil((count * bits) / 8);
  if (bytes > MAX_TENSOR_BYTES) {
    throw new UnsafeGraphError(`${where}: ${bytes} bytes, the limit is ${MAX_TENSOR_BYTES} (2 GiB)`);
  }
  const location = tensor.number("data_location");
  const held = ["raw_data", ...TYPED].filter((name) => tensor.has(name));
  if (location === EXTERNAL) {
    if (held.length) throw new UnsafeGraphError(`${where}: its bytes are in another file and in ${held[0]} as well`);
    if (dataType === STRING) throw new UnsafeGraphError(`${where}: strings in another file`);
    const found = entries(reader, tensor.spansOf("external_data"), where);
    checkExternal(found, bytes, Math.max(bits / 8, 1), where, weights);
    return;
  }
  if (location !== 0 || tensor.has("external_data")) {
    throw new UnsafeGraphError(`${where}: data_location ${location} and external_data contradict each other`);
  }
  const wrong = held.length === 1 && held[0] !== "raw_data" && held[0] !== typed;
  if (held.length > 1 || wrong || (dataType === STRING && held[0] === "raw_data")) {
    throw new UnsafeGraphError(`${where}: its values are in ${held.join(" and ")}, expected ${typed} or raw_data alone`);
  }
  const raw = tensor.span("raw_data");
  if (raw !== undefined) {
    if (raw[1] - raw[0] !== bytes) {
      throw new UnsafeGraphError(`${where}: ${raw[1] - raw[0]} bytes of raw_data, dtype and shape need ${bytes}`);
    }
    return;
  }
  const there = values(reader, tensor, typed);
  const needed = bits === 4 ? Math.ceil(count / 2) : count;
  if (there !== needed) {
    throw new UnsafeGraphError(`${where}: ${there} values in ${typed}, dtype and shape need ${needed}`);
  }
}

function elements(dims: readonly number[], where: string): number {
  if (dims.length > MAX_RANK) throw new UnsafeGraphError(`${where}: rank ${dims.length}, the limit is ${MAX_RANK}`);
  let count = 1;
  let empty = false;
  for (const dim of dims) {
    // Negative ones are beyond the limit, too: 64 bits of two's complement, read as an unsigned number.
    if (dim > MAX_TENSOR_BYTES) {
      throw new UnsafeGraphError(`${where}: its shape has a size that is not from 0 to ${MAX_TENSOR_BYTES}`);
    }
    empty ||= dim === 0;
    count *= dim;
  }
  return empty ? 0 : count;
}

function values(reader: Reader, tensor: Message, typed: string): number {
  if (typed === "string_data") return tensor.spansOf(typed).length;
  const span = tensor.span(typed);
  if (span === undefined) return 0;
  if (typed === "float_data" || typed === "double_data") {
    const count = (span[1] - span[0]) / (typed === "float_data" ? 4 : 8);
    return Number.isInteger(count) ? count : -1;
  }
  return reader.countVarints(span);
}

function entries(reader: Reader, spans: readonly Span[], where: string): Map<string, string> {
  const found = new Map<string, string>();
  for (const span of spans) {
    const entry = reader.read(ENTRY, span);
    const key = reader.text(entry.span("key"));
    const value = reader.text(entry.span("value"));
    if (!EXTERNAL_KEYS.includes(key) || found.has(key)) {
      throw new UnsafeGraphError(
        `${where}: external_data has '${key.slice(0, 64)}', expected ${EXTERNAL_KEYS.join(", ")}, each once`,
      );
    }
    found.set(key, value);
  }
  if (found.size !== EXTERNAL_KEYS.length) {
    throw new UnsafeGraphError(
      `${where}: external_data has ${[...found.keys()].join(", ")}, expected ${EXTERNAL_KEYS.join(", ")}`,
    );
  }
  return found;
}

function checkExternal(
  found: ReadonlyMap<string, string>,
  bytes: number,
  itemBytes: number,
  where: string,
  weights: WeightsFile,
): void {
  const location = found.get("location") ?? "";
  if (location !== weights.name) {
    throw new UnsafeGraphError(
      `${where}: its bytes are to come from '${location.slice(0, 200)}'; a graph may read '${weights.name}', the ` +
        "bundle's weights, and no other file. Do not use this bundle",
    );
  }
  const [offset, length] = ["offset", "length"].map((key) => {
    const text = found.get(key) ?? "";
    if (!NUMBER.test(text)) {
      throw new UnsafeGraphError(`${where}: ${key} '${text.slice(0, 32)}' is not a number of bytes`);
    }
    return Number(text);
  }) as [number, number];
  if (length !== bytes) {
    throw new UnsafeGraphError(`${where}: ${length} bytes of ${weights.name}, dtype and shape need ${bytes}`);
  }
  if (offset + length > weights.bytes) {
    throw new UnsafeGraphError(
      `${where}: bytes ${offset} to ${offset + length} of ${weights.name}, which has ${weights.bytes}`,
    );
  }
  // Runtimes map the file and compute in place, in loops that expect whole elements.
  if (offset % itemBytes !== 0) {
    throw new UnsafeGraphError(
      `${where}: misaligned: byte ${offset} of ${weights.name} is not a multiple of ${itemBytes}`,
    );
  }
}
