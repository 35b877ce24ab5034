/**
 * Whether so many steps can lead from some weights to others: what gradients train by the sum of the steps' bounds, and
 * running statistics by their ranges (archipel/protocol/provenance.py, archipel/strategies/running_statistics.py).
 */

import { isFinite, type NdArray, numberAt, sameDims } from "../../arrays.js";
import type { Manifest } from "../../bundle/manifest.js";
import type { Update } from "../../bundle/roles.js";
import { ProvenanceError } from "../errors.js";

export type Tensors = ReadonlyMap<string, NdArray>;

/** Added to a variance before it becomes a unit. */
const FLOOR = 1e-5;
/** The relative error that is allowed in each round for float32. */
const SLACK = 1e-3;
/** After so many rounds a mean may be anywhere. */
const MANY = 1000;

/** A pair that devices share: parameters by name, and the ranges of their entries. */
export interface Shared {
  readonly mean: string;
  readonly variance: string;
  readonly shift: number;
  readonly growth: number;
}

/** How many rounds lead back from the others, and then on to the weights. */
export interface Rounds {
  readonly back: number;
  readonly on: number;
}

/** Raises ProvenanceError unless names, dtypes and shapes are those of `others`, and every number is finite. */
export function checkTensors(what: string, weights: Tensors, others: Tensors): void {
  const refuse = (why: string): never => {
    throw new ProvenanceError(`${what}: ${why}`);
  };
  const foreign = [...weights.keys()].find((name) => !others.has(name));
  if (foreign !== undefined) refuse(`tensor ${JSON.stringify(foreign)} is not one of the bundle's`);
  for (const [name, { dtype, dims }] of others) {
    const array = weights.get(name) ?? refuse(`tensor ${JSON.stringify(name)} is missing`);
    if (array.dtype !== dtype || !sameDims(array.dims, dims)) {
      refuse(`tensor ${JSON.stringify(name)} is ${array.dtype}[${array.dims}], expected ${dtype}[${dims}]`);
    }
    if (!isFinite(array)) refuse(`tensor ${JSON.stringify(name)} has entries that are no finite numbers`);
  }
}

/** The pairs that devices of a training upload; none in a bundle whose statistics stay on the device. */
export function sharedStatistics(manifest: Manifest): Shared[] {
  const ports = Object.values(manifest.programs)
    .filter(({ kind }) => kind === "finish")
    .flatMap(({ outputs }) => outputs.filter((port): port is Update => port.role === "update"));
  const shifts = new Map(ports.filter(({ kind }) => kind === "mean").map(({ tensor, range }) => [tensor, range]));
  return ports
    .filter(({ kind }) => kind === "variance")
    .map(({ mean, tensor, range }) => ({ mean, variance: tensor, shift: shifts.get(mean) ?? 0, growth: range }));
}

/**
 * Checks that steps can lead from `others` to `weights`, with the same tensors and finite numbers: those that gradients
 * train are at most `bound` apart, as an L2 norm, with the rounding of `steps` additions in float32; the running
 * statistics are so many rounds apart. Raises ProvenanceError.
 */
export function checkMoved(
  what: string,
  manifest: Manifest,
  weights: Tensors,
  others: Tensors,
  bound: number,
  steps: number,
  rounds: Rounds,
): void {
  const pairs = sharedStatistics(manifest);
  const statistics = new Set(pairs.flatMap(({ mean, variance }) => [mean, variance]));
  checkDistance(what, [...weights.keys()].filter((name) => !statistics.has(name)), weights, others, bound, steps);
  for (const pair of pairs) checkStatistic(what, pair, weights, others, rounds);
}

function checkDistance(
  what: string,
  names: readonly string[],
  weights: Tensors,
  others: Tensors,
  bound: number,
  steps: number,
): void {
  let [distance, size] = [0, 0];
  for (const name of names) {
    const [one, two] = [weights.get(name) as NdArray, others.get(name) as NdArray];
    let [apart, first, second] = [0, 0, 0];
    for (let index = 0; index < one.data.length; index++) {
      const [a, b] = [numberAt(one, index), numberAt(two, index)];
      apart += (a - b) ** 2;
      first += a ** 2;
      second += b ** 2;
    }
    distance += apart;
    size += Math.max(first, second);
  }
  // A step rounds each element by half a unit in the last place, 2^-24 of it; twice that, and `bound` added to the
  // size, covers steps whose elements were larger than at either end.
  const allowed = bound + steps * 2 ** -23 * (Math.sqrt(size) + bound);
  if (!(Math.sqrt(distance) <= allowed) || !Number.isFinite(size)) {
    throw new ProvenanceError(
      `${what}: ${Math.sqrt(distance).toPrecision(4)} away from weights that this device knows, where ${steps} ` +
        `rounds can move them by ${allowed.toPrecision(4)} at most; these are not the weights that the server says ` +
        "they are",
    );
  }
}

function checkStatistic(what: string, pair: Shared, weights: Tensors, others: Tensors, { back, on }: Rounds): void {
  // Round i from `others` begins where as many rounds can have changed the unit; one that is taken back ends there. A
  // round multiplies s^2 by a factor of at most 1 + growth, or divides by that. Logarithms do not overflow.
  const most = Math.log1p(pair.growth) + SLACK;
  let sum = 0;
  for (let round = 1; round <= Math.min(back, MANY); round++) sum += Math.exp((round * most) / 2);
  for (let round = 0; round < Math.min(on, MANY); round++) sum += Math.exp(((back + round) * most) / 2);
  const reach = pair.shift * (1 + SLACK) * sum;
  const rounds = back + on;
  const refuse = (name: string, span: number): never => {
    throw new ProvenanceError(
      `${what}: running statistic ${JSON.stringify(name)} is farther from weights that this device knows than ` +
        `${rounds} rounds of range ${span} can move it; these are not the weights that the server says they are`,
    );
  };
  const [mean, firstMean, variance, firstVariance] = [pair.mean, pair.mean, pair.variance, pair.variance].map(
    (name, index) => (index % 2 ? others : weights).get(name) as NdArray,
  ) as [NdArray, NdArray, NdArray, NdArray];
  for (let index = 0; index < variance.data.length; index++) {
    const square = numberAt(variance, index) + FLOOR;
    const first = numberAt(firstVariance, index) + FLOOR;
    if (!(square >= FLOOR && Math.abs(Math.log(square / first)) <= rounds * most + 1e-6)) {
      refuse(pair.variance, pair.growth);
    }
    const [now, before] = [numberAt(mean, index), numberAt(firstMean, index)];
    const allowed = reach * Math.sqrt(first) + rounds * 2 ** -22 * Math.max(Math.abs(now), Math.abs(before));
    if (!(Math.abs(now - before) <= allowed)) refuse(pair.mean, pair.shift);
  }
}
