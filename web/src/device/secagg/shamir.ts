/**
 * Shamir's secret sharing over the integers modulo 2^256 + 297 (archipel/protocol/secagg/shamir.py).
 *
 * BigInt does not compute in constant time; whoever can time this worker so finely runs in the same process.
 */

import type { Bytes } from "../bytes.js";
import { ShareError, ThresholdError } from "../errors.js";

export const PRIME = 2n ** 256n + 297n;
export const SHARE_BYTES = 33;
const SECRET_BYTES = 32;

/** Shares of `secret` (32 bytes) for positions 1 to `count`. `draw(n)` gives n bytes of a cryptographic generator. */
export function split(
  secret: Uint8Array,
  threshold: number,
  count: number,
  draw: (bytes: number) => Uint8Array,
): Bytes[] {
  if (secret.length !== SECRET_BYTES) {
    throw new ShareError(`a secret has ${SECRET_BYTES} bytes, got ${secret.length}`);
  }
  if (!(threshold >= 1 && threshold <= count)) {
    throw new ThresholdError(`threshold ${threshold} must be from 1 to the number of shares, ${count}`);
  }
  // 64 bytes for an element: taken modulo the prime they are within 2^-255 of uniform.
  const coefficients = Array.from({ length: threshold - 1 }, () => numberOf(draw(64)) % PRIME);
  coefficients.push(numberOf(secret));
  return Array.from({ length: count }, (_, index) => bytesOf(polynomial(coefficients, BigInt(index + 1))));
}

/** The field element of a share. Raises ShareError unless it has exactly 33 bytes and is below the prime. */
export function decodeShare(share: Uint8Array): bigint {
  if (share.length !== SHARE_BYTES) throw new ShareError(`a share has ${SHARE_BYTES} bytes, got ${share.length}`);
  const y = numberOf(share);
  if (y >= PRIME) throw new ShareError("a share must be below 2^256 + 297");
  return y;
}

/**
 * The secret of (position, share) pairs, all of which must lie on one polynomial. Devices never need it: it is here to
 * check the shares that they deal. Raises ThresholdError or ShareError.
 */
export function reconstruct(points: readonly (readonly [x: number, share: Uint8Array])[], threshold: number): Bytes {
  const xs = points.map(([x]) => BigInt(x));
  if (new Set(xs).size !== xs.length || xs.some((x) => x <= 0n || x >= PRIME)) {
    throw new ShareError("positions of shares must be distinct and positive");
  }
  if (threshold < 1 || xs.length < threshold) {
    throw new ThresholdError(`${xs.length} shares, the threshold is ${threshold}`);
  }
  const ys = points.map(([, share]) => decodeShare(share));
  const first = xs.slice(0, threshold);
  for (const [index, x] of xs.entries()) {
    if (index >= threshold && interpolate(first, ys, x) !== ys[index]) {
      throw new ShareError(`${xs.length} shares do not lie on one polynomial of degree below ${threshold}`);
    }
  }
  const secret = interpolate(first, ys, 0n);
  if (secret >= 1n << 256n) throw new ShareError("the shares do not give a 32-byte secret");
  return bytesOf(secret).slice(1);
}

/** Lagrange's interpolation at `at` through the points (xs[i], ys[i]). */
function interpolate(xs: readonly bigint[], ys: readonly bigint[], at: bigint): bigint {
  let sum = 0n;
  for (const [index, x] of xs.entries()) {
    let [above, below] = [1n, 1n];
    for (const other of xs) {
      if (other === x) continue;
      above = (above * modulo(at - other)) % PRIME;
      below = (below * modulo(x - other)) % PRIME;
    }
    sum = (sum + (ys[index] as bigint) * above * power(below, PRIME - 2n)) % PRIME;
  }
  return sum;
}

function polynomial(coefficients: readonly bigint[], x: bigint): bigint {
  // Horner's rule, the highest power first.
  let y = 0n;
  for (const coefficient of coefficients) y = (y * x + coefficient) % PRIME;
  return y;
}

function power(base: bigint, exponent: bigint): bigint {
  let result = 1n;
  for (let square = base, rest = exponent; rest > 0n; rest >>= 1n, square = (square * square) % PRIME) {
    if (rest & 1n) result = (result * square) % PRIME;
  }
  return result;
}

function modulo(number: bigint): bigint {
  return ((number % PRIME) + PRIME) % PRIME;
}

function numberOf(bytes: Uint8Array): bigint {
  return BigInt(`0x${Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("") || "0"}`);
}

function bytesOf(number: bigint): Bytes {
  const digits = number.toString(16).padStart(2 * SHARE_BYTES, "0");
  return Uint8Array.from(digits.match(/../g) ?? [], (pair) => Number.parseInt(pair, 16));
}
