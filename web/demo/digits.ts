/** Pictures with labels: the page's own, and the files of digits that it comes with. */

import type { NdArray } from "../src/index.js";
import { SIDE } from "./raster.js";

/** `image` holds 28 x 28 bytes, 0 the paper and 255 the ink. */
export interface Digit {
  image: Uint8Array;
  label: number;
}

const PIXELS = SIDE * SIDE;

/** The digits of a .bin file: records of one label byte and 784 bytes of ink. */
export function decodeDigits(bytes: Uint8Array, file: string): Digit[] {
  const size = 1 + PIXELS;
  if (bytes.length === 0 || bytes.length % size !== 0) {
    throw new Error(`${file}: expected records of ${size} bytes, got ${bytes.length} bytes; build the page again`);
  }
  return Array.from({ length: bytes.length / size }, (_, index) => {
    const record = bytes.subarray(index * size, (index + 1) * size);
    const label = record[0] ?? 255;
    if (label > 9) throw new Error(`${file}: record ${index} has the label ${label}, expected 0..9`);
    return { label, image: record.slice(1) };
  });
}

/** What the network takes: float32 [n, 1, 28, 28] in 0..1. */
export function images(digits: readonly { image: Uint8Array }[]): NdArray {
  const data = new Float32Array(digits.length * PIXELS);
  digits.forEach(({ image }, index) => {
    data.set(
      Float32Array.from(image, (value) => value / 255),
      index * PIXELS,
    );
  });
  return { dtype: "float32", dims: [digits.length, 1, SIDE, SIDE], data };
}

/** Labels as int64 [n]. */
export function labels(digits: readonly Digit[]): NdArray {
  return { dtype: "int64", dims: [digits.length], data: BigInt64Array.from(digits, ({ label }) => BigInt(label)) };
}

/** The picture moved by whole pixels, paper coming in at the edges. */
export function shifted(image: Uint8Array, dx: number, dy: number): Uint8Array {
  const moved = new Uint8Array(PIXELS);
  for (let row = Math.max(0, dy); row < Math.min(SIDE, SIDE + dy); row += 1) {
    for (let column = Math.max(0, dx); column < Math.min(SIDE, SIDE + dx); column += 1) {
      moved[row * SIDE + column] = image[(row - dy) * SIDE + column - dx] ?? 0;
    }
  }
  return moved;
}
