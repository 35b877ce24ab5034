/** Arrays as they cross the library's border: dtype, dimensions and a typed array in row-major order. */

import { RuntimeInputError } from "./errors.js";
import { type DType, DTYPES } from "./bundle/roles.js";

export type TypedArray =
  | Float32Array
  | Float64Array
  | Int8Array
  | Uint8Array
  | Int16Array
  | Uint16Array
  | Int32Array
  | Uint32Array
  | BigInt64Array
  | BigUint64Array;

/** `data` is a Uint16Array for float16 (its bits) and a Uint8Array for bool. */
export interface NdArray {
  dtype: string;
  dims: number[];
  data: TypedArray;
}

interface ArrayConstructor {
  new (length: number): TypedArray;
  new (buffer: ArrayBufferLike, byteOffset?: number, length?: number): TypedArray;
  readonly BYTES_PER_ELEMENT: number;
}

const CONSTRUCTORS: Readonly<Record<DType, ArrayConstructor>> = {
  float16: Uint16Array,
  float32: Float32Array,
  float64: Float64Array,
  int8: Int8Array,
  uint8: Uint8Array,
  int16: Int16Array,
  uint16: Uint16Array,
  int32: Int32Array,
  uint32: Uint32Array,
  int64: BigInt64Array,
  uint64: BigUint64Array,
  bool: Uint8Array,
} as unknown as Record<DType, ArrayConstructor>;

export function isDType(name: unknown): name is DType {
  return (DTYPES as readonly unknown[]).includes(name);
}

export function sizeOf(dims: readonly number[]): number {
  return dims.reduce((size, dim) => size * dim, 1);
}

export function zeros(dtype: DType, dims: readonly number[]): NdArray {
  return { dtype, dims: [...dims], data: new CONSTRUCTORS[dtype](sizeOf(dims)) };
}

/** `dims` filled with one number; rounded to the dtype. */
export function full(dtype: DType, dims: readonly number[], value: number): NdArray {
  const array = zeros(dtype, dims);
  if (value !== 0) fill(array, value);
  return array;
}

/** Set the elements from `start` to before `end` to a number. */
export function fill(array: NdArray, value: number, start = 0, end = array.data.length): void {
  const { data } = array;
  if (data instanceof BigInt64Array || data instanceof BigUint64Array) {
    data.fill(BigInt(Math.trunc(value)), start, end);
  } else if (array.dtype === "float16") {
    data.fill(halfBits(value), start, end);
  } else {
    data.fill(array.dtype === "bool" ? Number(value !== 0) : value, start, end);
  }
}

/** A view of bytes as an array; copies only where they are not aligned to the element size. */
export function view(dtype: DType, dims: readonly number[], bytes: Uint8Array): NdArray {
  const constructor = CONSTRUCTORS[dtype];
  const aligned = bytes.byteOffset % constructor.BYTES_PER_ELEMENT === 0 ? bytes : bytes.slice();
  const data = new constructor(aligned.buffer, aligned.byteOffset, sizeOf(dims));
  return { dtype, dims: [...dims], data };
}

/** The array's bytes, without copying. */
export function bytesOf(array: NdArray): Uint8Array {
  return new Uint8Array(array.data.buffer, array.data.byteOffset, array.data.byteLength);
}

/** Raises RuntimeInputError unless it is an array: a known dtype, its kind of data, dimensions that multiply to it. */
export function checkNdArray(where: string, array: unknown): asserts array is NdArray & { dtype: DType } {
  const given = array as Partial<NdArray> | null | undefined;
  if (typeof given !== "object" || given === null || !Array.isArray(given.dims) || !ArrayBuffer.isView(given.data)) {
    throw new RuntimeInputError(`${where}: expected an array { dtype, dims, data }, got ${kindOf(array)}`);
  }
  const { dtype, dims, data } = given as NdArray;
  if (!isDType(dtype)) {
    throw new RuntimeInputError(`${where}: dtype ${JSON.stringify(dtype)} is not one of ${DTYPES.join(", ")}`);
  }
  if (!(data instanceof CONSTRUCTORS[dtype])) {
    throw new RuntimeInputError(
      `${where}: ${dtype} needs a ${(CONSTRUCTORS[dtype] as unknown as { name: string }).name}, got ${kindOf(data)}`,
    );
  }
  if (!dims.every((dim) => Number.isSafeInteger(dim) && dim >= 0) || sizeOf(dims) !== data.length) {
    throw new RuntimeInputError(`${where}: dims [${dims}] need ${sizeOf(dims)} elements, the data has ${data.length}`);
  }
}

/** Number of an element, exact for everything but 64-bit integers beyond 2^53. */
export function numberAt(array: NdArray, index: number): number {
  const value = array.data[index] ?? Number.NaN;
  return array.dtype === "float16" ? halfValue(Number(value)) : Number(value);
}

/** Whether every element is finite; integers are. */
export function isFinite(array: NdArray): boolean {
  const { data } = array;
  if (data instanceof Float32Array || data instanceof Float64Array) {
    for (let index = 0; index < data.length; index++) {
      if (!Number.isFinite(data[index])) return false;
    }
  } else if (array.dtype === "float16") {
    for (let index = 0; index < data.length; index++) {
      if (((data[index] as number) & 0x7c00) === 0x7c00) return false;
    }
  }
  return true;
}

export function sameDims(first: readonly (number | string)[], second: readonly (number | string)[]): boolean {
  return first.length === second.length && first.every((dim, axis) => dim === second[axis]);
}

function kindOf(value: unknown): string {
  if (value === null || typeof value !== "object") return String(value === null ? "null" : typeof value);
  return (value.constructor as { name?: string } | undefined)?.name ?? "an object";
}

const SCRATCH = new DataView(new ArrayBuffer(4));

/** IEEE 754 binary16 of a number, rounded to nearest even (by way of binary32, which is exact for what occurs here). */
export function halfBits(value: number): number {
  SCRATCH.setFloat32(0, value);
  const bits = SCRATCH.getUint32(0);
  const sign = (bits >>> 16) & 0x8000;
  const magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return sign | 0x7e00;
  if (magnitude >= 0x477ff000) return sign | 0x7c00;
  if (magnitude < 0x33000001) return sign;
  const exponent = magnitude >>> 23;
  // Subnormal halves shift the full significand, normal ones have their exponent rebased.
  const shift = exponent < 113 ? 126 - exponent : 13;
  const source = exponent < 113 ? (magnitude & 0x7fffff) | 0x800000 : magnitude - (112 << 23);
  const half = source >>> shift;
  const rest = source & ((1 << shift) - 1);
  const middle = 1 << (shift - 1);
  return sign | (half + Number(rest > middle || (rest === middle && (half & 1) === 1)));
}

export function halfValue(bits: number): number {
  const sign = bits & 0x8000 ? -1 : 1;
  const exponent = (bits >>> 10) & 0x1f;
  const fraction = bits & 0x3ff;
  if (exponent === 0x1f) return fraction ? Number.NaN : sign * Number.POSITIVE_INFINITY;
  return exponent ? sign * 2 ** (exponent - 15) * (1 + fraction / 1024) : sign * 2 ** -14 * (fraction / 1024);
}
