/** A fit from its first step, or from its checkpoint, to its end. */

import type { Phase } from "../bundle/manifest.js";
import { NonFiniteLossError } from "../errors.js";
import type { Checkpoint } from "../storage/checkpoints.js";
import type { Run } from "./control.js";
import { runBegin, runPhases, Training } from "./driver.js";
import type { Fields } from "./fields.js";
import { type EpochProgress, type History, lossOf, metricsOf, type Progress } from "./results.js";
import type { Sessions } from "./sessions.js";
import type { Values } from "./values.js";

export interface FittingOptions {
  readonly shuffle: boolean;
  readonly onStep?: ((progress: Progress) => unknown) | undefined;
  readonly onEpoch?: ((progress: EpochProgress) => unknown) | undefined;
  /** Measures the values as they are. */
  readonly validate: (() => Promise<Record<string, number>>) | null;
  readonly run: Run;
  readonly checkpoint: Checkpoint | null;
  /** Seconds between two checkpoints. */
  readonly checkpointEvery: number;
  /** Bytes. */
  readonly featureBudget: number;
}

/** Raises NonFiniteLossError when `values` holds the last weights with a finite loss, CheckpointError. */
export async function runFit(
  sessions: Sessions,
  phase: Phase,
  values: Values,
  fields: Fields,
  options: FittingOptions,
): Promise<History> {
  const { checkpoint, run } = options;
  const training = new Training(fields.count);
  const restored = await checkpoint?.read(values, training);
  const validation = restored?.validation ?? [];
  if (restored) takeUp(training, sessions, phase);
  let written = performance.now();
  const write = async (complete: boolean): Promise<void> => {
    await checkpoint?.write(values, training, validation, complete);
    written = performance.now();
  };
  if (!restored?.complete) {
    if (values.steps === 0) await runBegin(sessions, values);
    const onEpoch = async (epoch: number): Promise<void> => {
      const measured = await options.validate?.();
      if (measured !== undefined) validation.push(measured);
      await options.onEpoch?.({ epoch, step: values.steps, validation: measured ?? null });
    };
    const between = async (store: () => Promise<void>): Promise<boolean> => {
      const save = async (): Promise<void> => {
        if (checkpoint === null) return;
        await store();
        await write(false);
      };
      if (performance.now() - written >= 1000 * options.checkpointEvery) await save();
      return run.betweenSteps(save);
    };
    try {
      const watch = {
        onStep: options.onStep,
        onEpoch: options.validate !== null || options.onEpoch !== undefined ? onEpoch : undefined,
        between,
      };
      const { shuffle, featureBudget } = options;
      await runPhases(sessions, [phase], values, fields, training, shuffle, watch, featureBudget);
    } catch (error) {
      // The caller gets the weights; going on from the checkpoint would only diverge again.
      if (error instanceof NonFiniteLossError) await checkpoint?.remove();
      throw error;
    }
    await write(true);
  }
  return {
    losses: training.losses,
    metrics: Object.fromEntries(training.metrics.values),
    validation,
    steps: values.steps,
    examples: training.examples,
    stopped: training.stopped,
  };
}

/** What follows from a checkpoint's metrics. */
function takeUp(training: Training, sessions: Sessions, phase: Phase): void {
  const ports = metricsOf(sessions.bundle.program(phase.program).outputs);
  for (const port of ports) training.metrics.reductions.set(port.name, port.reduction);
  const loss = lossOf(ports);
  training.losses = loss === null ? [] : [...(training.metrics.values.get(loss.name) ?? [])];
}
