/**
 * The one way to run a bundle's programs: `begin`, the phases of a schedule, `finish`, by the roles of their ports.
 *
 * Nothing here knows any algorithm. What a federated algorithm does on a device is in the programs and in which roles
 * their inputs and outputs have.
 */

import { isFinite, type NdArray, numberAt } from "../arrays.js";
import type { Phase } from "../bundle/manifest.js";
import type { Bundle } from "../bundle/reader.js";
import type { Port, Program, ProgramKind } from "../bundle/roles.js";
import { NonFiniteLossError, RuntimeInputError, RuntimeProgramError } from "../errors.js";
import { addFeatures, findFeatures } from "./features.js";
import { type Arrays, BATCH_ROLES, collect, FIELD_ROLES, type Fields, fixedRows } from "./fields.js";
import { type Repeated, TrainLoop } from "./loop.js";
import { lossOf, metricsOf, MetricTable, type Progress } from "./results.js";
import { type Sessions, toArray } from "./sessions.js";
import { batches, grouped } from "./shuffle.js";
import type { Values } from "./values.js";

/** What follows training from outside. */
export interface Watch {
  /** Called after every step; training ends if it gives true. */
  readonly onStep?: ((progress: Progress) => unknown) | undefined;
  /** Called after every pass over the data, when the values are up to date. */
  readonly onEpoch?: ((epoch: number) => Promise<void>) | undefined;
  /**
   * Called after that, or after several steps that one graph made; it gets a function that brings the values up to
   * date, and training ends if it gives false.
   */
  readonly between?: ((store: () => Promise<void>) => Promise<boolean>) | undefined;
}

/** A run of phases: losses and metrics per step, which examples were used. `batches` of phase `phase` are done. */
export class Training {
  losses: number[] = [];
  readonly metrics = new MetricTable();
  readonly used: Uint8Array;
  stopped = false;
  phase = 0;
  batches = 0;

  constructor(count: number) {
    this.used = new Uint8Array(count);
  }

  get examples(): number {
    return this.used.reduce((sum, used) => sum + used, 0);
  }
}

/**
 * The name of the program of that kind: the one called like its kind, else the only one, null if there is none.
 *
 * Raises RuntimeProgramError if there are several and none is called like the kind.
 */
export function findProgram(bundle: Bundle, kind: ProgramKind): string | null {
  const names = Object.entries(bundle.manifest.programs)
    .filter(([, program]) => program.kind === kind)
    .map(([name]) => name);
  if (names.includes(kind)) return kind;
  if (names.length > 1) {
    throw new RuntimeProgramError(
      `bundle ${bundle.manifest.name} has several ${kind} programs (${names.sort().join(", ")}); name one`,
    );
  }
  return names[0] ?? null;
}

/** As `findProgram`, but raises RuntimeProgramError that names the `purpose` if there is none. */
export function needProgram(bundle: Bundle, kind: ProgramKind, purpose: string): string {
  const name = findProgram(bundle, kind);
  if (name === null) {
    throw new RuntimeProgramError(
      `bundle ${bundle.manifest.name} has no ${kind} program, so it cannot ${purpose}; convert it with one`,
    );
  }
  return name;
}

/** The local data for all phases, with what the features program reads, checked. Raises RuntimeInputError. */
export function collectData(
  bundle: Bundle,
  schedule: readonly Phase[],
  x: NdArray | Arrays,
  y: NdArray | null | undefined,
): Fields {
  const programs = scheduled(bundle, schedule);
  const features = findFeatures(bundle, programs);
  if (features !== null) programs.push(bundle.program(features));
  const ports = new Map<string, Port>();
  for (const port of programs.flatMap((program) => program.inputs)) {
    if (FIELD_ROLES.has(port.role) && !ports.has(port.name)) ports.set(port.name, port);
  }
  return collect("local data", [...ports.values()], x, y);
}

/**
 * Run a program that reads no data (begin, finish, refresh): its outputs by name.
 *
 * New parameters, personal tensors and state among them go to `values`.
 */
export async function runOnce(sessions: Sessions, name: string, values: Values): Promise<Map<string, NdArray>> {
  const program = sessions.bundle.program(name);
  const session = await sessions.get(name);
  const feed = Object.fromEntries(program.inputs.map((port) => [port.name, session.tensor(values.read(port))]));
  const results = await session.run(
    feed,
    program.outputs.map((port) => port.name),
  );
  const outputs = new Map<string, NdArray>();
  for (const port of program.outputs) {
    const array = await toArray(results[port.name] as never);
    outputs.set(port.name, array);
    values.write(port, array);
  }
  return outputs;
}

/** Run `begin` if there is one. */
export async function runBegin(sessions: Sessions, values: Values): Promise<void> {
  const name = findProgram(sessions.bundle, "begin");
  if (name !== null) await runOnce(sessions, name, values);
}

/**
 * Train through the phases in order; `values` has the result, also when a loss that is not finite ends it.
 *
 * `training` is one to begin or to go on with. `featureBudget` is in bytes.
 */
export async function runPhases(
  sessions: Sessions,
  schedule: readonly Phase[],
  values: Values,
  fields: Fields,
  training: Training,
  shuffle: boolean,
  watch: Watch,
  featureBudget: number,
): Promise<void> {
  const { bundle } = sessions;
  const name = findFeatures(bundle, scheduled(bundle, schedule));
  if (name !== null) await addFeatures(sessions, bundle, name, fields, featureBudget);
  for (let phase = schedule[training.phase]; phase !== undefined; phase = schedule[training.phase]) {
    await runPhase(sessions, phase, values, fields, training, shuffle, watch);
    if (training.stopped) break;
    training.phase++;
    training.batches = 0;
  }
  values.examples = training.examples;
}

/** Run `finish`: the update by output name, and its metrics. */
export async function finish(
  sessions: Sessions,
  values: Values,
): Promise<{ update: Record<string, NdArray>; metrics: Record<string, number> }> {
  const name = needProgram(sessions.bundle, "finish", "take part in a round");
  const outputs = await runOnce(sessions, name, values);
  const update: Record<string, NdArray> = {};
  const metrics: Record<string, number> = {};
  for (const port of sessions.bundle.program(name).outputs) {
    const array = outputs.get(port.name) as NdArray;
    if (port.role === "metric") metrics[port.name] = numberAt(array, 0);
    if (port.role !== "update") continue;
    if (!isFinite(array)) {
      throw new NonFiniteLossError(`program ${name}: update '${port.name}' has values that are not finite`);
    }
    update[port.name] = array;
  }
  return { update, metrics };
}

async function runPhase(
  sessions: Sessions,
  phase: Phase,
  values: Values,
  fields: Fields,
  training: Training,
  shuffle: boolean,
  watch: Watch,
): Promise<void> {
  const program = sessions.bundle.program(phase.program);
  const { rows, whole } = batchShape(phase, program, fields);
  const metrics = metricsOf(program.outputs);
  const loss = lossOf(metrics);
  const session = await sessions.get(phase.program);
  const loop = new TrainLoop(
    session,
    program,
    values,
    fields,
    phase.moves,
    await findRepeated(sessions, phase.program),
  );
  try {
    const source = batches({
      count: fields.count,
      batchSize: phase.batch_size,
      epochs: phase.epochs,
      steps: phase.steps,
      shuffle,
      seed: values.seed,
      phase: training.phase,
      whole,
      skip: training.batches,
    });
    for (const group of grouped(source, loop.atOnce, phase.batch_size)) {
      const step = values.steps;
      const indices = group.map((batch) => batch.indices);
      const found = await loop.step(indices, rows ?? indices[0]?.length ?? 0);
      let asked = false;
      for (const [index, batch] of group.entries()) {
        const measured = found[index] ?? {};
        for (const position of batch.indices) training.used[position] = 1;
        for (const port of metrics) training.metrics.add(port, measured[port.name] ?? Number.NaN, batch.indices.length);
        const value = loss === null ? null : (measured[loss.name] ?? Number.NaN);
        if (value !== null) training.losses.push(value);
        const progress = { phase: training.phase, epoch: batch.epoch, step: step + index, loss: value };
        // All are called, even after one has asked to stop.
        if ((await watch.onStep?.(progress)) === true) asked = true;
      }
      training.batches += group.length;
      const last = group.at(-1);
      if (watch.onEpoch !== undefined && last?.lastOfEpoch) {
        await loop.store();
        await watch.onEpoch(last.epoch);
      }
      if (asked || (watch.between !== undefined && !(await watch.between(() => loop.store())))) {
        training.stopped = true;
        break;
      }
    }
    await loop.finish();
  } finally {
    loop.close();
  }
}

/** The program that makes most steps of program `name` at once, null if there is none. */
async function findRepeated(sessions: Sessions, name: string): Promise<Repeated | null> {
  const found = Object.entries(sessions.bundle.manifest.programs)
    .filter(([, program]) => program.repeats === name)
    .sort(([, first], [, second]) => second.steps - first.steps)[0];
  return found === undefined ? null : { session: await sessions.get(found[0]), program: found[1] };
}

/** The rows that the graph is made for, if it is, and whether only whole batches will do. */
function batchShape(phase: Phase, program: Program, fields: Fields): { rows: number | null; whole: boolean } {
  const rows = fixedRows(program.inputs.filter((port) => BATCH_ROLES.has(port.role)));
  if (rows !== null && rows !== phase.batch_size) {
    throw new RuntimeInputError(
      `program ${phase.program} is made for batches of ${rows}; the batch size must be that, is ${phase.batch_size}`,
    );
  }
  const whole = rows !== null && !program.inputs.some((port) => port.role === "example_weight");
  if (whole && fields.count < phase.batch_size) {
    throw new RuntimeInputError(
      `${fields.count} examples, but program ${phase.program} is made for batches of ${phase.batch_size}; ` +
        "give more, or convert with a free batch axis",
    );
  }
  return { rows, whole };
}

function scheduled(bundle: Bundle, schedule: readonly Phase[]): Program[] {
  return [...new Set(schedule.map((phase) => phase.program))].map((name) => bundle.program(name));
}
