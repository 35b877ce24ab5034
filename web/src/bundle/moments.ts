/** The rules of a manifest about update entries of running statistics, which come in pairs. */

import { ManifestError } from "../errors.js";
import type { Program } from "./roles.js";

export function validateMoments(where: string, program: Program): void {
  const updates = program.outputs.filter((port) => port.role === "update");
  const here = (name: string): string => `${where}: update ${JSON.stringify(name)}`;
  const moments = updates.filter((port) => port.kind === "mean" || port.kind === "variance");
  const [first] = moments;
  if (first !== undefined && program.kind !== "finish") {
    throw new ManifestError(`${here(first.name)}: only finish uploads running statistics`);
  }
  const means = new Map(moments.flatMap((port) => (port.kind === "mean" ? [[port.tensor, port]] : [])));
  for (const port of updates) {
    if (port.kind !== "variance") {
      if (port.mean) throw new ManifestError(`${here(port.name)}: mean is of a variance, this is a ${port.kind}`);
      continue;
    }
    // Each mean goes with one variance: the server needs both for the variance of all examples.
    const mean = means.get(port.mean);
    if (mean === undefined || JSON.stringify(mean.shape) !== JSON.stringify(port.shape)) {
      throw new ManifestError(
        `${here(port.name)}: ${JSON.stringify(port.mean)} is no mean of shape [${port.shape}] that it alone goes with`,
      );
    }
    means.delete(port.mean);
  }
  for (const port of means.values()) throw new ManifestError(`${here(port.name)}: no variance goes with this mean`);
  for (const port of moments) {
    if (port.clip !== null || port.noise) {
      throw new ManifestError(`${here(port.name)}: a running statistic has no clip and no noise`);
    }
  }
}
