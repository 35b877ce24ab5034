/**
 * Tensors as safetensors: strict reading with limits before allocation, deterministic writing.
 *
 * The format: 8 bytes little-endian header length, a JSON header {name: {dtype, shape, data_offsets}}, then the bytes of
 * all tensors without holes. Added for hostile files: bounds on everything, no duplicate or overlapping tensors, and
 * data aligned to its element size so that it can be viewed in place.
 */

import { bytesOf, type NdArray, sizeOf, view } from "../arrays.js";
import { TensorLayoutError } from "../errors.js";
import { DecodeError, dictionary, integer, list, required, struct, text } from "./decoders.js";
import { JsonSyntaxError, parseJson } from "./json.js";
import type { DType } from "./roles.js";
import { isPrintable, ITEM_BYTES, MAX_RANK, MAX_TENSOR_BYTES } from "./validation.js";

export const MAX_HEADER_BYTES = 4 << 20;
/** Characters of a tensor's name: those of a manifest, and a prefix for what the device keeps of it. */
export const MAX_NAME = 288;

const DTYPE_NAMES: ReadonlyMap<string, DType> = new Map<string, DType>([
  ["F16", "float16"],
  ["F32", "float32"],
  ["F64", "float64"],
  ["I8", "int8"],
  ["U8", "uint8"],
  ["I16", "int16"],
  ["U16", "uint16"],
  ["I32", "int32"],
  ["U32", "uint32"],
  ["I64", "int64"],
  ["U64", "uint64"],
  ["BOOL", "bool"],
]);

interface Entry {
  readonly dtype: string;
  readonly shape: readonly number[];
  readonly data_offsets: readonly number[];
}

/** Where a tensor's bytes lie: `offset` from the start of the file, in bytes. */
export interface TensorPlace {
  readonly dtype: DType;
  readonly shape: readonly number[];
  readonly offset: number;
  readonly nbytes: number;
}

const header = dictionary(
  struct<Entry>({
    dtype: required(text),
    shape: required(list(integer)),
    data_offsets: required(list(integer)),
  }),
);

/** Arrays over the file's bytes, not copies. Raises TensorLayoutError. */
export function readWeights(file: Uint8Array, maxBytes = MAX_TENSOR_BYTES): Map<string, NdArray> {
  if (file.length > maxBytes) throw new TensorLayoutError(`weights: ${file.length} bytes, the limit is ${maxBytes}`);
  const arrays = new Map<string, NdArray>();
  for (const [name, place] of weightsLayout(file)) {
    arrays.set(name, view(place.dtype, place.shape, file.subarray(place.offset, place.offset + place.nbytes)));
  }
  return arrays;
}

/** Check the header. Raises TensorLayoutError. */
export function weightsLayout(file: Uint8Array): Map<string, TensorPlace> {
  if (file.length < 8) throw new TensorLayoutError(`weights: ${file.length} bytes, too short for a safetensors header`);
  const length = new DataView(file.buffer, file.byteOffset, 8).getBigUint64(0, true);
  const most = Math.min(MAX_HEADER_BYTES, file.length - 8);
  if (length < 2n || length > BigInt(most)) {
    throw new TensorLayoutError(`weights: header length ${length} is not from 2 to ${most} bytes`);
  }
  const start = 8 + Number(length);
  let entries: Readonly<Record<string, Entry>>;
  try {
    // The writer pads with spaces to align the data; JSON allows them.
    entries = header(parseJson(file.subarray(8, start)), "").value;
  } catch (error) {
    if (error instanceof JsonSyntaxError || error instanceof DecodeError) {
      throw new TensorLayoutError(`weights: header: ${error.message}`);
    }
    throw error;
  }
  const places = Object.entries(entries).map(([name, entry]) => ({ name, place: placeOf(name, entry, start) }));
  places.sort((a, b) => a.place.offset - b.place.offset || a.place.nbytes - b.place.nbytes);
  let end = start;
  for (const { name, place } of places) {
    if (place.offset !== end) {
      throw new TensorLayoutError(`weights: tensor ${quoted(name)} starts at byte ${place.offset}, expected ${end}`);
    }
    end += place.nbytes;
  }
  if (end !== file.length) {
    throw new TensorLayoutError(`weights: tensors end at byte ${end}, the file has ${file.length}`);
  }
  return new Map(places.map(({ name, place }) => [name, place]));
}

/** Safetensors bytes with the tensors sorted by element size (largest first), then name, so that all are aligned. */
export function writeWeights(tensors: ReadonlyMap<string, NdArray>): Uint8Array<ArrayBuffer> {
  const names = new Map([...DTYPE_NAMES].map(([short, long]) => [long as string, short]));
  const sorted = [...tensors].sort(
    ([a, x], [b, y]) => y.data.BYTES_PER_ELEMENT - x.data.BYTES_PER_ELEMENT || (a < b ? -1 : Number(a > b)),
  );
  let end = 0;
  const entries = sorted.map(([name, array]) => {
    const first = end;
    end += array.data.byteLength;
    const entry = { dtype: names.get(array.dtype), shape: array.dims, data_offsets: [first, end] };
    return `${JSON.stringify(name)}:${JSON.stringify(entry)}`;
  });
  const head = new TextEncoder().encode(`{${entries.join(",")}}`);
  const padded = Math.ceil(head.length / 8) * 8;
  const file = new Uint8Array(8 + padded + end);
  new DataView(file.buffer).setBigUint64(0, BigInt(padded), true);
  file.fill(0x20, 8, 8 + padded);
  file.set(head, 8);
  let at = 8 + padded;
  for (const [, array] of sorted) {
    file.set(bytesOf(array), at);
    at += array.data.byteLength;
  }
  return file;
}

function placeOf(name: string, entry: Entry, start: number): TensorPlace {
  const here = `weights: tensor ${quoted(name)}`;
  if (!isPrintable(name, MAX_NAME)) {
    throw new TensorLayoutError(`${here}: its name is not 1 to ${MAX_NAME} printable characters`);
  }
  const dtype = DTYPE_NAMES.get(entry.dtype);
  if (dtype === undefined) {
    throw new TensorLayoutError(
      `${here} has dtype ${quoted(entry.dtype)}, expected one of ${[...DTYPE_NAMES.keys()].join(", ")}`,
    );
  }
  if (entry.shape.length > MAX_RANK || !entry.shape.every((dim) => dim >= 0 && dim <= MAX_TENSOR_BYTES)) {
    throw new TensorLayoutError(`${here} has shape [${entry.shape.slice(0, 16)}], rank at most ${MAX_RANK}`);
  }
  const nbytes = sizeOf(entry.shape) * ITEM_BYTES[dtype];
  if (nbytes > MAX_TENSOR_BYTES) {
    throw new TensorLayoutError(`${here} has ${nbytes} bytes, the limit is ${MAX_TENSOR_BYTES} (2 GiB)`);
  }
  const [first = -1, last = -1] = entry.data_offsets;
  if (entry.data_offsets.length !== 2 || first < 0 || last - first !== nbytes) {
    throw new TensorLayoutError(
      `${here}: ${entry.dtype}[${entry.shape}] needs ${nbytes} bytes, its offsets are [${entry.data_offsets.slice(0, 4)}]`,
    );
  }
  if ((start + first) % ITEM_BYTES[dtype]) {
    throw new TensorLayoutError(
      `${here} is misaligned: byte ${start + first} is not a multiple of ${ITEM_BYTES[dtype]}`,
    );
  }
  return { dtype, shape: entry.shape, offset: start + first, nbytes };
}

function quoted(value: string): string {
  return JSON.stringify(value.slice(0, 64));
}
