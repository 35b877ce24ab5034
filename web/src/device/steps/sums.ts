/** Bounds of a sum of updates, divided by the sum of their weights (archipel/protocol/bounds.py). */

import type { Update } from "../../bundle/roles.js";
import { entries, type Group, groups, noiseOf, SLACK, step, weightPort } from "../updates/bounds.js";

/**
 * The largest L2 norm of the entries of one kind in a sum of so many devices' updates, divided by the sum of weights.
 * Infinite where the manifest states no smallest weight.
 */
export function meanNorm(updates: readonly Update[], kind: "delta" | "value", devices: number): number {
  let squares = 0;
  for (const group of groupsOf(updates, kind)) {
    const [first] = group.ports as [Update];
    // A group without a clip has a bound for each element: n of at most b have a norm of at most b sqrt(n).
    const elements = group.norm !== null ? 1 : Math.sqrt(entries(first));
    // A matrix is at most as long as its factors times the root of 2.
    const gain = group.ports.some((port) => port.carries?.method === "low_rank") ? 2 : 1;
    squares += gain * (meanBound(updates, group, devices) * elements) ** 2;
  }
  // The groups have no entries in common, so their norms add up as squares.
  return Math.sqrt(squares);
}

/** The groups of the entries of one kind. */
export function groupsOf(updates: readonly Update[], kind: "delta" | "value"): Group[] {
  return groups(updates).filter(({ ports }) => ports[0]?.kind === kind);
}

/** The most that a group measures in such a mean: its norm, or its largest element where it has no clip. */
export function meanBound(updates: readonly Update[], group: Group, devices: number): number {
  // The bound of the sum is c W + d with c and d not negative, so divided by W it is largest for the smallest W.
  const least = leastWeights(updates, devices);
  if (least <= 0) return Number.POSITIVE_INFINITY;
  const port = weightPort(updates);
  const weights = group.weighted && port !== undefined ? least + (devices * step(port)) / 2 : devices;
  const one = group.norm ?? (group.ports[0] as Update).range;
  return (one * weights * (1 + SLACK) + rounding(group, devices) + noiseOf(group, devices)) / least;
}

/** The smallest possible decoded sum of the weights of so many devices. */
function leastWeights(updates: readonly Update[], devices: number): number {
  const port = weightPort(updates);
  if (port === undefined) return devices;
  // A weight of exactly `lowest` may be rounded down, and float32 may be off by its last bit.
  const units = Math.floor((port.lowest / step(port)) * (1 - 1e-6));
  // Where `lowest` is below a step, a weight may be encoded as 0.
  return devices * (port.lowest >= step(port) ? Math.max(units, 1) : 0) * step(port);
}

/** What fixed point adds to the measure of the sum at most. */
function rounding({ norm, ports }: Group, devices: number): number {
  if (norm === null) return (devices * step(ports[0] as Update)) / 2;
  // Entries that the program itself rounded are whole steps already.
  const rounded = ports.filter((port) => port.carries?.method !== "rotation");
  return devices * Math.sqrt(rounded.reduce((sum, port) => sum + entries(port) * (step(port) / 2) ** 2, 0));
}

