/**
 * Shamir's secret sharing over the integers modulo 2^31 - 1 (archipel/protocol/secagg_plus/shares.py).
 *
 * A secret of 32 bytes is nine elements of 30 bits, shared on polynomials of their own. JavaScript does not compute in
 * constant time; whoever can time this worker so finely runs in the same process.
 */

import { type Bytes, concat, label, uint32Bytes } from "../bytes.js";
import { digest } from "../crypto.js";
import { ShareError, ThresholdError } from "../errors.js";

const SECRET_BYTES = 32;
export const SHARE_BYTES = 36;
export const COMMITMENT_BYTES = 16;
const ELEMENTS = 9;
const BITS = 30;
const PRIME = 2 ** 31 - 1;
const SHARE = label("share", 2);

/** Shares of `secret` (32 bytes) for positions 1 to `holders`. `draw(n)` gives n bytes of a cryptographic generator. */
export function split(
  secret: Uint8Array,
  threshold: number,
  holders: number,
  draw: (bytes: number) => Uint8Array,
): Bytes[] {
  if (secret.length !== SECRET_BYTES) {
    throw new ShareError(`a secret has ${SECRET_BYTES} bytes, got ${secret.length}`);
  }
  if (!(threshold >= 1 && threshold <= holders)) {
    throw new ThresholdError(`threshold ${threshold} must be from 1 to the number of holders, ${holders}`);
  }
  const coefficients = uniform((threshold - 1) * ELEMENTS, draw);
  const constants = toElements(secret);
  return Array.from({ length: holders }, (_, index) => valuesAt(index + 1, coefficients, constants));
}

/** The values of all polynomials at `x`, as a share. `coefficients`: nine of each power, the highest power first. */
function valuesAt(x: number, coefficients: Float64Array, constants: readonly number[]): Bytes {
  const values = new Float64Array(ELEMENTS);
  // Horner's rule. Numbers below 2^53 are exact: a sum is below 2^33, and a position below 2^17.
  for (let at = 0; at < coefficients.length; at += ELEMENTS) {
    for (let element = 0; element < ELEMENTS; element++) {
      const product = ((values[element] as number) + (coefficients[at + element] as number)) * x;
      // Modulo 2^31 - 1 the high bits count as much as the low ones; below 2^32 is small enough until the end.
      const high = Math.floor(product / 2 ** 31);
      values[element] = product - high * 2 ** 31 + high;
    }
  }
  const share = new Uint8Array(SHARE_BYTES);
  const view = new DataView(share.buffer);
  values.forEach((value, element) => {
    view.setUint32(4 * element, (value + (constants[element] as number)) % PRIME, true);
  });
  return share;
}

/** Uniform elements of the field. */
function uniform(count: number, draw: (bytes: number) => Uint8Array): Float64Array {
  const found = new Float64Array(count);
  for (let filled = 0; filled < count; ) {
    const drawn = draw(4 * (count - filled));
    const view = new DataView(drawn.buffer, drawn.byteOffset, drawn.byteLength);
    for (let at = 0; at < drawn.length; at += 4) {
      const element = view.getUint32(at, true) & PRIME;
      // Drawing again, and not taking a remainder, keeps them uniform.
      if (element < PRIME) found[filled++] = element;
    }
  }
  return found;
}

function toElements(secret: Uint8Array): number[] {
  let number = 0n;
  for (const byte of secret.toReversed()) number = (number << 8n) | BigInt(byte);
  return Array.from({ length: ELEMENTS }, (_, index) => Number((number >> BigInt(BITS * index)) & (2n ** 30n - 1n)));
}

/** Raises ShareError unless the share has 36 bytes that are elements of the field. */
export function checkShare(share: Uint8Array): void {
  if (share.length !== SHARE_BYTES) throw new ShareError(`a share has ${SHARE_BYTES} bytes, got ${share.length}`);
  const view = new DataView(share.buffer, share.byteOffset, share.byteLength);
  for (let at = 0; at < SHARE_BYTES; at += 4) {
    if (view.getUint32(at, true) >= PRIME) throw new ShareError("a share must have elements below 2^31 - 1");
  }
}

/**
 * The dealer's commitment to a share, 16 bytes: nobody can show another share that fits it. `associated` names the
 * session. A share has 279 uniform bits, so its hash needs no salt to hide it.
 */
export async function commit(
  dealer: number,
  position: number,
  share: Uint8Array,
  associated: Uint8Array,
): Promise<Bytes> {
  const hash = await digest(concat(SHARE, associated, uint32Bytes(dealer), uint32Bytes(position), share));
  return hash.slice(0, COMMITMENT_BYTES);
}
