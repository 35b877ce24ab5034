/** The rules of a manifest about the metrics that training rounds sum up. */

import { ManifestError } from "../errors.js";
import type { Program } from "./roles.js";

/** Metrics with a range, which devices add to the sum of a training round. */
export function validateMetrics(programs: Readonly<Record<string, Program>>): void {
  const stated = new Map<string, string>();
  for (const [name, program] of Object.entries(programs)) {
    for (const port of program.outputs) {
      if (port.role !== "metric" || port.range === null) continue;
      const here = `program ${quoted(name)}: metric ${quoted(port.name)}`;
      if (program.kind !== "train" && program.kind !== "finish") {
        throw new ManifestError(`${here}: only metrics of train and finish have a range, not of ${program.kind}`);
      }
      if (!(port.range > 0 && port.range < Infinity)) {
        throw new ManifestError(`${here}: range must be above 0 and finite, is ${port.range}`);
      }
      if (program.kind === "train" && port.reduction !== "mean") {
        throw new ManifestError(`${here}: with a range its reduction must be "mean", is ${quoted(port.reduction)}`);
      }
      if (program.kind === "finish" && port.range !== 1) {
        throw new ManifestError(`${here}: it is 0 or 1 of each device, so its range must be 1, is ${port.range}`);
      }
      const declaration = `${program.kind} ${port.range}`;
      if ((stated.get(port.name) ?? declaration) !== declaration) {
        throw new ManifestError(`${here}: another program states another range, or is of another kind`);
      }
      stated.set(port.name, declaration);
    }
  }
  for (const [name, program] of Object.entries(programs)) {
    if (!stated.size || (program.kind !== "train" && program.kind !== "finish")) continue;
    if (program.inputs.some((port) => port.role === "noise")) {
      throw new ManifestError(
        `program ${quoted(name)}: it reads noise, so no metric may have a range: rounds would sum it without noise`,
      );
    }
  }
}

function quoted(value: string): string {
  return JSON.stringify(value.slice(0, 80));
}
