/** Masks modulo 2^b: the key stream of AES-256-CTR, four bytes (little-endian) for each entry. */

import { keyStream, streamKey } from "../crypto.js";
import { ProtocolError } from "../errors.js";

/** Entries at a time; a multiple of the four that a block of AES makes. */
const CHUNK = 1 << 20;
/** Whether a Uint32Array has the low byte first here, as on every machine with a browser of today. */
const LITTLE_ENDIAN = new Uint8Array(Uint32Array.of(1).buffer)[0] === 1;

/** Add (`sign` 1) or subtract (-1) the mask of the 32-byte key in place, modulo 2^32; call `reduce` afterwards. */
export async function applyMask(vector: Uint32Array, key: Uint8Array, sign: 1 | -1): Promise<void> {
  const stream = await streamKey(key);
  for (let start = 0; start < vector.length; start += CHUNK) {
    const part = vector.subarray(start, start + CHUNK);
    const drawn = words(await keyStream(stream, start / 4, 4 * part.length));
    // A Uint32Array keeps what is stored modulo 2^32.
    if (sign > 0) for (let index = 0; index < part.length; index++) part[index]! += drawn[index] as number;
    else for (let index = 0; index < part.length; index++) part[index]! -= drawn[index] as number;
  }
}

/** Modulo 2^bits, in place. */
export function reduce(vector: Uint32Array, bits: number): void {
  if (bits === 32) return;
  const mask = 2 ** bits - 1;
  for (let index = 0; index < vector.length; index++) vector[index]! &= mask;
}

/** The device with the larger id adds the pair's mask, the other subtracts it (Bonawitz et al. 2017, section 4). */
export function pairwiseSign(own: string, peer: string): 1 | -1 {
  return own > peer ? 1 : -1;
}

/** Raises ProtocolError unless every entry is below 2^bits. */
export function checkVector(where: string, vector: Uint32Array, bits: number): void {
  if (bits === 32) return;
  const index = vector.findIndex((entry) => entry >= 2 ** bits);
  if (index >= 0) throw new ProtocolError(`${where}: entry ${index} is not below 2^${bits}`);
}

function words(bytes: ArrayBuffer): Uint32Array {
  if (LITTLE_ENDIAN) return new Uint32Array(bytes);
  const view = new DataView(bytes);
  return Uint32Array.from({ length: bytes.byteLength / 4 }, (_, index) => view.getUint32(4 * index, true));
}
