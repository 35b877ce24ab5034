/** Waits after failed attempts: each is longer than the one before, or as long as the server asks for. */

const JITTER = 0.2;

/** Seconds to wait after `failures` (from 1) attempts in a row have failed. */
export function waitAfter(failures: number, first: number, longest: number, asked: number | null): number {
  return jittered(Math.min(asked ?? first * 2 ** (failures - 1), longest));
}

/** Longer or shorter by up to a fifth, so that devices do not all ask at once. */
export function jittered(seconds: number): number {
  return seconds * (1 + JITTER * (2 * Math.random() - 1));
}
