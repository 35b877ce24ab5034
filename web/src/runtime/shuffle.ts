/**
 * The order of the local data: the same permutation as every other runtime draws.
 *
 * A counter-based hash on 32-bit words of seed, phase, epoch and position gives position i of n a key, and the order is
 * the positions sorted by key. The mixing function is a bijection of words, hence keys never collide.
 */

const GOLDEN = 0x9e3779b9;
const M1 = 0x7feb352d;
const M2 = 0x846ca68b;

/** `indices` into the local data; `epoch` counts from 0 within the phase. */
export interface Batch {
  readonly epoch: number;
  readonly indices: Uint32Array;
  readonly lastOfEpoch: boolean;
}

export interface BatchPlan {
  readonly count: number;
  readonly batchSize: number;
  readonly epochs: number | null;
  readonly steps: number | null;
  readonly shuffle: boolean;
  readonly seed: number;
  readonly phase: number;
  /** Only batches of one size; the last rows of a pass that make none are left out. */
  readonly whole: boolean;
  /** Batches that are done already. */
  readonly skip: number;
}

/** Positions 0 ... count - 1 in the order of (seed, phase, epoch), all below 2^32. */
export function permutation(count: number, seed: number, phase: number, epoch: number): Uint32Array {
  const first = fold(seed, phase, epoch, 0);
  const second = fold(seed, phase, epoch, 1);
  const keys = new Uint32Array(count);
  for (let position = 0; position < count; position++) {
    keys[position] = mix(mix((position + first) >>> 0) ^ second);
  }
  const order = Uint32Array.from({ length: count }, (_, position) => position);
  return sortedByHalf(sortedByHalf(order, keys, 0), keys, 16);
}

/** Cut the data into batches for `epochs` passes or for `steps` batches (as many passes as they need). */
export function* batches(plan: BatchPlan): Generator<Batch> {
  const { count, batchSize, epochs, steps, seed, phase } = plan;
  const stop = plan.whole ? count - (count % batchSize) : count;
  const perEpoch = Math.ceil(stop / batchSize);
  let step = plan.skip;
  let epoch = Math.floor(step / perEpoch);
  let done = step % perEpoch;
  while (epochs !== null ? epoch < epochs : step < (steps ?? 0)) {
    const order = plan.shuffle
      ? permutation(count, seed, phase, epoch)
      : Uint32Array.from({ length: count }, (_, index) => index);
    for (let first = done * batchSize; first < stop; first += batchSize) {
      if (epochs === null && step === steps) return;
      const indices = order.subarray(first, Math.min(first + batchSize, stop));
      yield { epoch, indices, lastOfEpoch: first + batchSize >= stop };
      step++;
    }
    epoch++;
    done = 0;
  }
}

/** Groups of `size` batches of `rows` examples within one pass; what makes no group comes one by one. */
export function* grouped(source: Iterable<Batch>, size: number, rows: number): Generator<Batch[]> {
  let group: Batch[] = [];
  for (const batch of source) {
    group.push(batch);
    if (batch.indices.length === rows && group.length === size) {
      yield group;
      group = [];
    } else if (batch.indices.length !== rows || batch.lastOfEpoch) {
      for (const each of group) yield [each];
      group = [];
    }
  }
  for (const each of group) yield [each];
}

/** A pass of a radix sort: `order` by 16 bits of its keys, equal ones as they were. */
function sortedByHalf(order: Uint32Array, keys: Uint32Array, shift: number): Uint32Array {
  const starts = new Uint32Array(0x10001);
  const half = (position: number): number => ((keys[position] as number) >>> shift) & 0xffff;
  for (const position of order) (starts[half(position) + 1] as number)++;
  for (let value = 1; value < starts.length; value++) (starts[value] as number) += starts[value - 1] as number;
  const sorted = new Uint32Array(order.length);
  for (const position of order) sorted[(starts[half(position)] as number)++] = position;
  return sorted;
}

function fold(...words: readonly number[]): number {
  let value = 0;
  for (const word of words) value = mix((((value ^ word) >>> 0) + GOLDEN) >>> 0);
  return value;
}

function mix(word: number): number {
  let value = word >>> 0;
  value ^= value >>> 16;
  value = Math.imul(value, M1);
  value ^= value >>> 15;
  value = Math.imul(value, M2);
  return (value ^ (value >>> 16)) >>> 0;
}
