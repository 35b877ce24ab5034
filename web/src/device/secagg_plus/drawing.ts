/**
 * Each device draws its own neighbours, from randomness of its own (archipel/protocol/secagg_plus/drawing.py).
 *
 * What protects a device are its own neighbours alone, so it draws them itself, when the cohort is already fixed:
 * nobody can lead its draw, and the server learns it only with the question who they are.
 */

/** `count` distinct places of a cohort of `size` other than `own`, uniform over all orders; all where it is less. */
export function drawNeighbours(
  size: number,
  own: number,
  count: number,
  draw: (bytes: number) => Uint8Array,
): number[] {
  const others = Array.from({ length: size }, (_, place) => place).filter((place) => place !== own);
  const drawn = Math.min(count, others.length);
  // The beginning of a Fisher-Yates shuffle.
  for (let index = 0; index < drawn; index++) {
    const chosen = index + below(others.length - index, draw);
    [others[index], others[chosen]] = [others[chosen] as number, others[index] as number];
  }
  return others.slice(0, drawn);
}

/** Uniform from 0 to `bound` - 1: draws again instead of taking a remainder of what is not a multiple. */
function below(bound: number, draw: (bytes: number) => Uint8Array): number {
  const least = 2 ** 32 % bound;
  for (;;) {
    const bytes = draw(4);
    const drawn = new DataView(bytes.buffer, bytes.byteOffset, 4).getUint32(0);
    if (drawn >= least) return drawn % bound;
  }
}
