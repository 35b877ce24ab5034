/** What one training learns from: one's own digits, and digits of other people so that those are not forgotten. */

import { type Digit, shifted } from "./digits.js";

const SHIFTS = [
  [0, 0],
  [1, 0],
  [-1, 0],
  [0, 1],
  [0, -1],
] as const;

/**
 * Every rehearsal digit once, and copies of one's own (in place, and moved by a pixel each way) until they are about as
 * many. A single example is repeated no more than `SHIFTS.length` times two, so that it does not outweigh everything.
 */
export function trainingSet(own: readonly Digit[], rehearsal: readonly Digit[]): Digit[] {
  if (own.length === 0) return [...rehearsal];
  const copies = Math.min(2 * SHIFTS.length, Math.max(1, Math.ceil(rehearsal.length / own.length)));
  const mine = Array.from({ length: copies }, (_, copy) => {
    const [dx, dy] = SHIFTS[copy % SHIFTS.length] ?? SHIFTS[0];
    return own.map(({ image, label }) => ({ label, image: shifted(image, dx, dy) }));
  });
  return [...rehearsal, ...mine.flat()];
}
