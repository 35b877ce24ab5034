/** What training gives back. */

import type { NdArray } from "../arrays.js";
import type { Metric, Port } from "../bundle/roles.js";
import { exactSum } from "./exact_sum.js";

/** One training step that was made. `step` counts from 0 over all phases; `loss` is null without a metric. */
export interface Progress {
  readonly phase: number;
  readonly epoch: number;
  readonly step: number;
  readonly loss: number | null;
}

/** A pass over the data that was made. `validation` are the metrics of the validation data, null without such data. */
export interface EpochProgress {
  readonly epoch: number;
  readonly step: number;
  readonly validation: Record<string, number> | null;
}

/** A fit: `losses` and each of `metrics` hold one number per step, `validation` one result per epoch. */
export interface History {
  losses: number[];
  metrics: Record<string, number[]>;
  validation: Record<string, number>[];
  steps: number;
  /** How many examples were used, each counted once. */
  examples: number;
  /** Whether it ended early, by `cancel` or by a callback. */
  stopped: boolean;
}

/** A local round: `arrays` by the name of the `finish` program's update outputs, ready to be encoded. */
export interface LocalUpdate {
  arrays: Record<string, NdArray>;
  examples: number;
  steps: number;
  /** The reduced metrics of training and of `finish`. */
  metrics: Record<string, number>;
  losses: number[];
  /** The model as it was trained here, which stays on the device. */
  parameters: Record<string, NdArray>;
}

/** Collects metrics over steps or batches and reduces each as its role declares. */
export class MetricTable {
  readonly values = new Map<string, number[]>();
  readonly weights = new Map<string, number[]>();
  readonly reductions = new Map<string, Metric["reduction"]>();

  /** `weight` is how many examples the value stands for; only the reduction "mean" looks at it. */
  add(port: Metric, value: number, weight: number): void {
    this.reductions.set(port.name, port.reduction);
    append(this.values, port.name, value);
    append(this.weights, port.name, weight);
  }

  reduced(): Record<string, number> {
    return Object.fromEntries(Array.from(this.values, ([name, values]) => [name, this.reduce(name, values)]));
  }

  private reduce(name: string, values: readonly number[]): number {
    const reduction = this.reductions.get(name);
    if (reduction === "last") return values.at(-1) ?? Number.NaN;
    if (reduction === "sum") return exactSum(values);
    const weights = this.weights.get(name) ?? [];
    const total = exactSum(weights);
    if (total === 0) return Number.NaN;
    return exactSum(values.map((value, index) => value * (weights[index] ?? 0))) / total;
  }
}

export function metricsOf(ports: readonly Port[]): Metric[] {
  return ports.filter((port) => port.role === "metric");
}

/** The metric that is the loss: the one called "loss", else the program's first. */
export function lossOf(metrics: readonly Metric[]): Metric | null {
  return metrics.find((port) => port.name === "loss") ?? metrics[0] ?? null;
}

function append(table: Map<string, number[]>, name: string, value: number): void {
  const list = table.get(name);
  if (list === undefined) table.set(name, [value]);
  else list.push(value);
}
