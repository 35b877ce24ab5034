/** The bytes of a masked vector (archipel/protocol/vector.py and narrow.py). */

import type { RoundPlan } from "../messages/rounds.js";
import type { Bytes } from "../bytes.js";
import { concat } from "../bytes.js";
import { entries, largest } from "./bounds.js";
import type { Layout } from "./layout.js";

/** Bytes of a masked vector of the plan's round on the wire. */
export function maskedSize(layout: Layout, plan: RoundPlan): number {
  if (!plan.narrow) return layout.length * Math.ceil(plan.modulus_bits / 8);
  return widthsOf(layout, plan.max_cohort).reduce((sum, [count, bits]) => sum + Math.ceil((count * bits) / 8), 0);
}

/**
 * The bytes of a masked vector. In a narrow round an entry takes as many bits as its own sum needs, and each update
 * port begins with a new byte; in others it takes the whole bytes of the modulus. The low ones come first.
 */
export function packMasked(layout: Layout, vector: Uint32Array, plan: RoundPlan): Bytes {
  if (!plan.narrow) return packBits(vector, 8 * Math.ceil(plan.modulus_bits / 8));
  const parts: Bytes[] = [];
  let start = 0;
  for (const [count, bits] of widthsOf(layout, plan.max_cohort)) {
    parts.push(packBits(vector.subarray(start, start + count), bits));
    start += count;
  }
  return concat(...parts);
}

/** For each update port how many entries it has, and how many bits a sum of `maxCohort` devices needs. */
function widthsOf(layout: Layout, maxCohort: number): [count: number, bits: number][] {
  // One bit more than the largest value has, for the sign.
  return layout.updates.map((port) => [entries(port), (maxCohort * largest(port)).toString(2).length + 1]);
}

/** The low `bits` bits, from 1 to 32, of each number, one after the other, the low bits first. */
export function packBits(numbers: Uint32Array, bits: number): Bytes {
  const packed = new Uint8Array(Math.ceil((numbers.length * bits) / 8));
  const modulus = 2 ** bits;
  // At most 7 bits wait for a byte, so that all of them stay below 2^39, which a float64 holds exactly.
  let [waiting, held, at] = [0, 0, 0];
  for (let index = 0; index < numbers.length; index++) {
    waiting += ((numbers[index] as number) % modulus) * 2 ** held;
    held += bits;
    for (; held >= 8; held -= 8) {
      packed[at++] = waiting % 256;
      waiting = Math.floor(waiting / 256);
    }
  }
  if (held) packed[at] = waiting;
  return packed;
}
