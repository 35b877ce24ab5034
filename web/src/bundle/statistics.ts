/** What the sums of an `analyze` program mean, as a manifest states it, and the rules about that. */

import { ManifestError } from "../errors.js";
import { type Decoder, float, list, oneOf, optional, required, struct, text } from "./decoders.js";
import type { Program } from "./roles.js";

/** The sums are update outputs with the tensors NAME/sum, NAME/count (of a mean) and NAME/histogram. */
export interface Statistic {
  readonly name: string;
  readonly kind: "sum" | "mean" | "histogram" | "quantiles";
  readonly program: string;
  readonly edges: readonly number[];
  readonly probabilities: readonly number[];
}

export const statistic: Decoder<Statistic> = struct<Statistic>({
  name: required(text),
  kind: required(oneOf("sum", "mean", "histogram", "quantiles")),
  program: required(text),
  edges: optional(list(float), [], "[]"),
  probabilities: optional(list(float), [], "[]"),
});

/** The names themselves are checked by the caller. */
export function validateStatistics(
  statistics: readonly Statistic[],
  programs: Readonly<Record<string, Program>>,
): void {
  if (new Set(statistics.map(({ name }) => name)).size !== statistics.length) {
    throw new ManifestError("manifest: two statistics have the same name");
  }
  for (const { name, kind, program, edges, probabilities } of statistics) {
    const where = `statistic ${JSON.stringify(name)}`;
    const computing = programs[program];
    if (computing?.kind !== "analyze") {
      throw new ManifestError(`${where}: ${JSON.stringify(program)} is not an analyze program of this bundle`);
    }
    const binned = kind === "histogram" || kind === "quantiles";
    const parts = kind === "mean" ? ["sum", "count"] : [binned ? "histogram" : "sum"];
    const shape = JSON.stringify(binned ? [edges.length + 1] : []);
    for (const part of parts) {
      const tensor = `${name}/${part}`;
      const port = computing.outputs.find((each) => each.role === "update" && each.tensor === tensor);
      if (port === undefined || JSON.stringify(port.shape) !== shape) {
        throw new ManifestError(`${where}: ${JSON.stringify(program)} must upload ${tensor} of shape ${shape}`);
      }
    }
    if (binned !== edges.length > 0 || (kind === "quantiles") !== probabilities.length > 0) {
      throw new ManifestError(`${where}: a ${kind} has edges [${edges}] and probabilities [${probabilities}]`);
    }
    if (edges.some((edge, index) => index > 0 && !((edges[index - 1] as number) < edge))) {
      throw new ManifestError(`${where}: edges must be finite and grow`);
    }
    const once = new Set(probabilities).size === probabilities.length;
    if (!once || probabilities.some((each) => !(each >= 0 && each <= 1))) {
      throw new ManifestError(`${where}: probabilities must be from 0 to 1, each once`);
    }
  }
}
