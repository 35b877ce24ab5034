/** A device's results of an evaluation, by the names that tasks and gates ask for (archipel/protocol/metrics/measures.py). */

import type { Metric, Program } from "../bundle/roles.js";

const [COUNT, CORRECT] = ["count", "correct"];
export const ACCURACY = "accuracy";

/** The metrics of an `evaluate` program by those names. */
export function measures(program: Program): ReadonlyMap<string, Metric> {
  const metrics = program.outputs.flatMap((port) => (port.role === "metric" ? [port] : []));
  const ports = new Map(metrics.map((port) => [port.name, port]));
  const named = [...ports].filter(([name, port]) => !(name === COUNT && port.reduction === "sum"));
  return new Map(
    named.map(([name, port]) => {
      const share = name === CORRECT && port.reduction === "sum" && !ports.has(ACCURACY);
      return [share ? ACCURACY : name, port] as const;
    }),
  );
}

/** The value of one of them on this device, from what `evaluate` gave for so many examples; NaN where it has none. */
export function measured(
  program: Program,
  name: string,
  metrics: Readonly<Record<string, number>>,
  examples: number,
): number {
  const port = measures(program).get(name);
  const counts = program.outputs.some(
    (each) => each.role === "metric" && each.name === COUNT && each.reduction === "sum",
  );
  const count = counts && examples ? Math.round(metrics[COUNT as string] ?? 0) : examples;
  const value = port === undefined ? undefined : metrics[port.name];
  if (port === undefined || value === undefined || !(count > 0)) return Number.NaN;
  return port.reduction === "sum" ? value / count : value;
}
