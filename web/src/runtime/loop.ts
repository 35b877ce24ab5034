/**
 * Training steps of one program over one schedule phase, without bringing what moves to the caller between steps.
 *
 * The tensors that a step writes are those that the next one reads; with WebGPU they stay on the GPU. Those before are
 * kept for one more step, as a loss tells about the weights that the step before it wrote. Where noise is added, the
 * loss, which has none, must decide nothing: there the loop looks at the tensors that a step has written instead.
 */

import { fill, isFinite, type NdArray, numberAt, zeros } from "../arrays.js";
import type { Metric, Port, Program } from "../bundle/roles.js";
import { tensorOf } from "../bundle/roles.js";
import { NonFiniteLossError } from "../errors.js";
import type { Ort } from "./delegates.js";
import { BATCH_ROLES, type Fields, type Source } from "./fields.js";
import { lossOf, metricsOf } from "./results.js";
import { type Feed, type Session, toArray } from "./sessions.js";
import { fixedShape, type Values } from "./values.js";

export type Metrics = Readonly<Record<string, number>>;
type Moving = ReadonlyMap<string, Ort.Tensor>;

/** A program that makes `program.steps` of the loop's steps in one graph, and its session. */
export interface Repeated {
  readonly session: Session;
  readonly program: Program;
}

/** Holds a phase's tensors. `moves` names the parameters and personal tensors that take their new values. */
export class TrainLoop {
  private readonly moving: readonly Port[];
  private readonly loss: Metric | null;
  private readonly noisy: boolean;
  private readonly single: Stepper;
  private readonly repeated: Stepper | null;
  /** By `role/tensor`. */
  private current: Moving;
  private previous: Moving | null = null;
  /** The minibatches between the two. */
  private between: { readonly batches: readonly Uint32Array[]; readonly rows: number } = { batches: [], rows: 0 };

  constructor(
    session: Session,
    program: Program,
    private readonly values: Values,
    fields: Fields,
    moves: readonly string[] | null,
    repeated: Repeated | null,
  ) {
    const written = program.outputs.filter(isModel);
    this.moving = written.filter((port) => doesMove(port, moves));
    this.loss = lossOf(metricsOf(program.outputs));
    this.noisy = program.inputs.some((port) => port.role === "noise");
    this.single = new Stepper(session, program, values, fields, this.moving);
    // Tensors that stay would move inside a repeated graph.
    const unchanged = this.moving.length === written.length;
    this.repeated =
      repeated !== null && unchanged
        ? new Stepper(repeated.session, repeated.program, values, fields, this.moving)
        : null;
    const read = new Set(program.inputs.filter(isModel).map(keyOf));
    this.current = new Map(
      this.moving
        .filter((port) => read.has(keyOf(port)))
        .map((port) => [keyOf(port), session.tensor(values.read(port))]),
    );
  }

  /** How many minibatches of one size `step` takes best; it also takes one. */
  get atOnce(): number {
    return this.repeated?.steps ?? 1;
  }

  /**
   * Train on one or `atOnce` minibatches, each the indices of its examples, padded to `rows` with weight 0.
   *
   * Returns the metrics of each. Raises NonFiniteLossError after going back to the last tensors whose loss was finite,
   * or with noise to the last finite ones.
   */
  async step(batches: readonly Uint32Array[], rows: number): Promise<Metrics[]> {
    if (batches.length > 1 && this.repeated !== null) return this.run(this.repeated, batches, rows);
    return this.oneByOne(batches, rows);
  }

  /** Hand the present tensors to the values. */
  async store(): Promise<void> {
    for (const port of this.moving) {
      const tensor = this.current.get(keyOf(port));
      if (tensor !== undefined) this.values.write(port, await toArray(tensor));
    }
  }

  /** As `store`, for the end of a phase. Raises NonFiniteLossError if the last step left numbers not finite. */
  async finish(): Promise<void> {
    const fault = await this.infinite(this.current);
    if (fault !== null) await this.goBack(fault);
    await this.store();
  }

  /** Free what is on the GPU. */
  close(): void {
    release(this.current);
    release(this.previous);
  }

  private async oneByOne(batches: readonly Uint32Array[], rows: number): Promise<Metrics[]> {
    const all: Metrics[] = [];
    for (const indices of batches) all.push(...(await this.run(this.single, [indices], rows)));
    return all;
  }

  private async run(stepper: Stepper, batches: readonly Uint32Array[], rows: number): Promise<Metrics[]> {
    const { metrics, next } = await stepper.run(batches, rows, this.current);
    const fault = this.noisy ? await this.infinite(next) : this.badLoss(metrics);
    if (fault === null) {
      this.moved(next, batches, rows);
      return metrics;
    }
    release(next);
    // Noise is never drawn twice, and the present tensors are finite.
    if (this.noisy) await this.stop(fault);
    if (batches.length === 1) await this.goBack(fault);
    // One by one from the same tensors, to find the step that fails and keep what was good before it.
    return this.oneByOne(batches, rows);
  }

  private moved(next: Moving, batches: readonly Uint32Array[], rows: number): void {
    release(this.previous);
    this.previous = this.current;
    this.current = next;
    this.between = { batches, rows };
    this.values.steps += batches.length;
  }

  private badLoss(metrics: readonly Metrics[]): string | null {
    for (const each of metrics) {
      const loss = this.loss === null ? 0 : each[this.loss.name];
      if (!Number.isFinite(loss)) return `the loss is ${loss} at`;
    }
    return null;
  }

  /** Which of the moving tensors is not finite. */
  private async infinite(tensors: Moving): Promise<string | null> {
    for (const port of this.moving) {
      const tensor = tensors.get(keyOf(port));
      if (tensor !== undefined && !isFinite(await toArray(tensor))) return `'${port.name}' is not finite after`;
    }
    return null;
  }

  private async goBack(what: string): Promise<never> {
    const failed = this.values.steps;
    if (this.previous !== null) {
      release(this.current);
      this.current = this.previous;
      this.previous = null;
      // A graph of several steps made more than one: all but the last of them again.
      const { batches, rows } = this.between;
      this.values.steps -= batches.length;
      for (const indices of batches.slice(0, -1)) {
        const { next } = await this.single.run([indices], rows, this.current);
        release(this.current);
        this.current = next;
        this.values.steps++;
      }
      this.values.steps = failed;
    }
    return this.stop(what);
  }

  private async stop(what: string): Promise<never> {
    await this.store();
    const kept = this.noisy ? "finite weights" : "weights with a finite loss";
    throw new NonFiniteLossError(
      `training stopped: ${what} step ${this.values.steps}; the last ${kept} are kept. ` +
        "Lower the learning rate or look for bad examples",
    );
  }
}

/** A train program with everything in place that does not change from step to step. */
class Stepper {
  readonly steps: number;
  private readonly outputs: readonly string[];
  private readonly metrics: readonly Metric[];
  private readonly constant: Feed = {};
  private readonly varying: readonly Port[];
  private readonly reads: ReadonlyMap<string, string>;
  private readonly batches = new Map<number, BatchTensors>();

  constructor(
    private readonly session: Session,
    private readonly program: Program,
    private readonly values: Values,
    private readonly fields: Fields,
    private readonly moving: readonly Port[],
  ) {
    this.steps = program.steps;
    this.metrics = metricsOf(program.outputs);
    this.outputs = [...moving, ...this.metrics].map((port) => port.name);
    const keys = new Set(moving.map(keyOf));
    const isMoving = (port: Port): boolean => isModel(port) && keys.has(keyOf(port));
    this.reads = new Map(program.inputs.filter(isMoving).map((port) => [keyOf(port), port.name]));
    const rest = program.inputs.filter((port) => !BATCH_ROLES.has(port.role) && !isMoving(port));
    this.varying = rest.filter(
      (port) => port.role === "step" || port.role === "noise" || (port.role === "count" && port.of === "steps"),
    );
    for (const port of rest) {
      if (!this.varying.includes(port)) this.constant[port.name] = session.tensor(values.read(port));
    }
  }

  /** The metrics of each minibatch, and the tensors after the last one. */
  async run(
    batches: readonly Uint32Array[],
    rows: number,
    current: Moving,
  ): Promise<{ metrics: Metrics[]; next: Moving }> {
    let tensors = this.batches.get(rows);
    if (tensors === undefined) {
      tensors = new BatchTensors(this.session, this.program, this.fields, rows);
      this.batches.set(rows, tensors);
    }
    await tensors.fill(batches);
    const feed: Feed = { ...this.constant, ...tensors.feed };
    for (const port of this.varying) feed[port.name] = this.session.tensor(this.values.read(port));
    for (const [key, input] of this.reads) {
      const tensor = current.get(key);
      if (tensor !== undefined) feed[input] = tensor;
    }
    const results = await this.session.run(feed, this.outputs);
    const next = new Map(this.moving.map((port) => [keyOf(port), results[port.name] as Ort.Tensor]));
    const found = await Promise.all(this.metrics.map((port) => toArray(results[port.name] as Ort.Tensor)));
    const metrics = Array.from({ length: this.steps }, (_, step) =>
      Object.fromEntries(this.metrics.map((port, index) => [port.name, numberAt(found[index] as NdArray, step)])),
    );
    return { metrics, next };
  }
}

/** Tensors for minibatches of `rows` examples, filled anew for every step. */
class BatchTensors {
  readonly feed: Feed = {};
  private readonly parts: { array: NdArray; source: Source | undefined; weight: boolean; width: number }[] = [];

  constructor(
    session: Session,
    program: Program,
    fields: Fields,
    private readonly rows: number,
  ) {
    const several = program.steps > 1;
    for (const port of program.inputs) {
      if (!BATCH_ROLES.has(port.role)) continue;
      const source = fields.sources.get(port.name);
      const rest = source === undefined ? fixedShape(port, several ? 2 : 1) : source.dims.slice(1);
      const array = zeros(port.dtype, several ? [program.steps, rows, ...rest] : [rows, ...rest]);
      const width = rest.reduce((size, dim) => size * dim, 1);
      this.parts.push({ array, source, weight: port.role === "example_weight", width });
      this.feed[port.name] = session.tensor(array);
    }
  }

  /** Gather the examples; rows beyond a batch's indices repeat its first one, with weight 0. */
  async fill(batches: readonly Uint32Array[]): Promise<void> {
    for (const [index, indices] of batches.entries()) {
      for (const { array, source, weight, width } of this.parts) {
        const start = index * this.rows * width;
        const [used, end] = [start + indices.length * width, start + this.rows * width];
        if (source === undefined) fill(array, 1, start, used);
        else {
          const taken = source.take(indices, array.data, start);
          if (taken !== undefined) await taken;
        }
        if (weight) fill(array, 0, used, end);
        else for (let at = used; at < end; at += width) array.data.copyWithin(at, start, start + width);
      }
    }
  }
}

function isModel(port: Port): boolean {
  return port.role === "parameter" || port.role === "personal" || port.role === "state";
}

function keyOf(port: Port): string {
  return `${port.role}/${tensorOf(port)}`;
}

function doesMove(port: Port, chosen: readonly string[] | null): boolean {
  if (port.role === "state") return port.lifetime !== "step";
  return chosen === null || chosen.includes(tensorOf(port) ?? "");
}

function release(tensors: Moving | null): void {
  for (const tensor of tensors?.values() ?? []) if (tensor.location === "gpu-buffer") tensor.dispose();
}
