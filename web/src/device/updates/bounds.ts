/** Bounds of an update of a device that runs its signed program (archipel/protocol/bounds.py). */

import type { NdArray } from "../../arrays.js";
import { numberAt } from "../../arrays.js";
import type { Update } from "../../bundle/roles.js";
import { exactSum } from "../../runtime/exact_sum.js";
import { BoundError } from "../errors.js";

/** The relative error that float32 arithmetic in graphs may make. */
export const SLACK = 1e-3;
/** The absolute error allowed: where a bound is 0, a relative one allows none. */
const TINY = 1e-12;
/** In standard deviations: Gaussian noise exceeds this in less than one of 10^30 cases. */
const TAIL = 12;

export type Arrays = Readonly<Record<string, NdArray>>;

/** Number of elements of an update port. */
export function entries(port: Update): number {
  return port.shape.reduce<number>((product, dim) => product * Number(dim), 1);
}

/** M, the integer that encodes `range`. */
export function largest(port: Update): number {
  return 2 ** (port.bits - 1) - 1;
}

/** The value of one step of the fixed-point encoding. */
export function step(port: Update): number {
  return port.range / largest(port);
}

/** The port that uploads the device's weight; undefined where the program uploads none. */
export function weightPort(updates: readonly Update[]): Update | undefined {
  return updates.find((port) => port.kind === "weight");
}

/** Entries with one bound: those that the program clips together, or one entry without a clip. */
export interface Group {
  readonly name: string;
  readonly ports: readonly Update[];
  /** The clip, or null: then the entry's range bounds each element. */
  readonly norm: number | null;
  readonly weighted: boolean;
}

/** All entries but the weight, grouped by their bound. */
export function groups(updates: readonly Update[]): Group[] {
  const hasWeight = weightPort(updates) !== undefined;
  const found = new Map<string, { name: string; ports: Update[]; norm: number | null; weighted: boolean }>();
  for (const port of updates) {
    if (port.kind === "weight") continue;
    const weighted = hasWeight && port.weighting !== "uniform";
    // A clip bounds the norm over all deltas (or all values) together; without one each tensor is its own group.
    const name = port.clip !== null ? `${port.kind}s` : `'${port.tensor}'`;
    const key = JSON.stringify([name, port.clip, weighted]);
    const group = found.get(key) ?? { name, ports: [], norm: port.clip, weighted };
    group.ports.push(port);
    found.set(key, group);
  }
  return [...found.values()];
}

/** The bound of one device of weight 1 as one of the L2 norm. */
export function normBound({ norm, ports }: Group): number {
  const [first] = ports as [Update];
  return norm ?? first.range * Math.sqrt(entries(first));
}

/**
 * Raises BoundError unless one device's arrays (by port name, finite) are within the manifest's bounds. Entries without
 * a clip are not checked: the encoding clamps them.
 */
export function checkUpdate(updates: readonly Update[], arrays: Arrays): void {
  const port = weightPort(updates);
  let weight = 1;
  if (port !== undefined) {
    weight = numberAt(arrays[port.name] as NdArray, 0);
    if (!(port.lowest * (1 - SLACK) <= weight && weight <= port.range * (1 + SLACK))) {
      throw new BoundError(
        `update '${port.name}': the weight is ${weight}, expected at least ${port.lowest} and up to ${port.range}, ` +
          "as the manifest states",
      );
    }
  }
  for (const group of groups(updates)) {
    if (group.norm === null) continue;
    const bound = group.norm * (group.weighted ? weight : 1);
    const norm = jointNorm(group.ports.map((each) => arrays[each.name] as NdArray));
    if (!(norm <= bound * (1 + SLACK) + noiseOf(group, 1) + TINY)) {
      throw new BoundError(
        `update: the norm of its ${group.name} is ${norm}, at most ${bound} is allowed; the program that made it ` +
          "breaks the bound that its manifest states",
      );
    }
  }
}

/** The absolute value to clamp each port's elements to: a weighted value's range times the weight. */
export function clampLimits(updates: readonly Update[], arrays: Arrays): Map<string, number> {
  const port = weightPort(updates);
  const weight = port === undefined ? 1 : numberAt(arrays[port.name] as NdArray, 0);
  const limits = new Map(updates.map((each) => [each.name, each.range]));
  for (const group of groups(updates)) {
    const [first] = group.ports as [Update];
    if (group.weighted && group.norm === null) {
      limits.set(first.name, Math.min(first.range, first.range * weight + first.noise * TAIL));
    }
  }
  return limits;
}

/** The L2 norm of the elements of all arrays together, added up exactly. */
export function jointNorm(arrays: readonly NdArray[]): number {
  const sums = arrays.map((array) => {
    let sum = 0;
    for (let index = 0; index < array.data.length; index++) sum += numberAt(array, index) ** 2;
    return sum;
  });
  return Math.sqrt(exactSum(sums));
}

/** What the noise of so many devices adds to the measure at most; so does what a program rounds by chance. */
export function noiseOf(group: Group, devices: number): number {
  const noise = Math.max(...group.ports.map((port) => port.noise));
  const size = (ports: readonly Update[]): number => ports.reduce((sum, port) => sum + entries(port), 0);
  if (noise) return noise * Math.sqrt(devices) * ((group.norm === null ? 0 : Math.sqrt(size(group.ports))) + TAIL);
  const rotated = group.ports.filter((port) => port.carries?.method === "rotation");
  if (!rotated.length) return 0;
  return Math.max(...rotated.map(step)) * Math.sqrt(devices) * (Math.sqrt(size(rotated)) / 2 + TAIL);
}
