/** A bundle that predicts, evaluates and keeps learning: the part that does the work, on whatever thread it is. */

import type { NdArray } from "../arrays.js";
import type { EvaluateOptions, FitOptions, RoundOptions, Runtime } from "../api.js";
import type { Manifest, Phase } from "../bundle/manifest.js";
import type { Bundle } from "../bundle/reader.js";
import { NonFiniteLossError, RuntimeInputError, RuntimeLimitError, RuntimeProgramError } from "../errors.js";
import { checkOptions } from "../options.js";
import { Checkpoint, fingerprint } from "../storage/checkpoints.js";
import { persistStorage } from "../storage/persistence.js";
import { writeSlot } from "../storage/slots.js";
import { Control, type Run } from "./control.js";
import type { Delegate, Engine } from "./delegates.js";
import { type DeviceState, joinNames } from "./device_state.js";
import { collectData, findProgram, finish, needProgram, runBegin, runOnce, runPhases, Training } from "./driver.js";
import { evaluate, evaluationFields } from "./evaluation.js";
import { DEFAULT_FEATURE_BUDGET } from "./features.js";
import { type Arrays, collect } from "./fields.js";
import { checkLabels } from "./labels.js";
import { runFit } from "./fitting.js";
import type { Randomness } from "./noise.js";
import { checkedParameters, completeParameters, copied, sameBytes } from "./parameters.js";
import { Predictor } from "./predictor.js";
import type { History, LocalUpdate } from "./results.js";
import { type Carry, findLearned, type Found, type Restored, storageProblem } from "./restoring.js";
import { Sessions } from "./sessions.js";
import { Turns } from "./turn.js";
import { checkNoise, Values } from "./values.js";

const CHECKPOINT_EVERY = 30;
const VALIDATION_BATCH = 256;

/** Raises RuntimeLimitError or RuntimeProgramError for a bundle that this device must not or cannot run. */
export function checkBundle(bundle: Bundle, memoryLimit: number | undefined): void {
  const { name, limits, programs } = bundle.manifest;
  if (memoryLimit !== undefined && limits.peak_bytes > memoryLimit) {
    throw new RuntimeLimitError(
      `bundle ${name} needs up to ${limits.peak_bytes} bytes of memory, the limit here is ${memoryLimit}; ` +
        "raise memoryLimit or use a smaller model",
    );
  }
  for (const port of Object.values(programs).flatMap((program) => program.inputs)) {
    if (port.role === "noise") checkNoise(port);
  }
}

export class RuntimeCore implements Runtime {
  readonly manifest: Manifest;
  readonly digest: string;
  restored: Restored | null = null;
  storageProblem: string | null = null;
  readonly device: DeviceState = { personal: new Map(), state: new Map() };
  private readonly control = new Control();
  private readonly turns = new Turns();
  private readonly sessions: Sessions;
  private present: Map<string, NdArray>;
  private published = true;
  private predictor: Promise<Predictor> | null = null;
  private closed = false;
  private reason: string | null = null;

  constructor(
    private readonly bundle: Bundle,
    private readonly engine: Engine,
    private readonly memoryLimit: number | undefined,
  ) {
    checkBundle(bundle, memoryLimit);
    this.manifest = bundle.manifest;
    this.digest = bundle.digest;
    this.sessions = new Sessions(bundle, engine);
    this.present = bundle.parameters();
  }

  get delegate(): Delegate {
    return this.engine.delegate;
  }

  get delegateReason(): string {
    const others = Array.from(this.sessions.fallenBack, ([name, why]) => `${name} runs on wasm: ${why}`);
    return [this.reason ?? this.engine.reason, ...others].join("; ");
  }

  /** The same runtime, with what was found out about its delegate. */
  because(reason: string): this {
    this.reason = reason;
    return this;
  }

  // --- use -----------------------------------------------------------------------------------------------------------

  predict(x: NdArray): Promise<NdArray>;
  predict(x: Arrays): Promise<Record<string, NdArray>>;
  async predict(x: NdArray | Arrays): Promise<NdArray | Record<string, NdArray>> {
    this.open();
    return (await this.presentPredictor()).predict(x);
  }

  async evaluate(options: EvaluateOptions): Promise<Record<string, number>> {
    checkOptions("evaluate", options);
    return this.exclusive(async () => {
      const name = needProgram(this.bundle, "evaluate", "evaluate");
      const fields = collect("evaluate", evaluationFields(this.bundle), options.x, options.y);
      checkLabels("evaluate", this.bundle, fields, options.ignoreLabel);
      const batchSize = options.batchSize ?? VALIDATION_BATCH;
      const predictor = await this.presentPredictor();
      return evaluate(this.sessions, name, predictor, this.values(), options.x, options.y, batchSize);
    });
  }

  async parameters(): Promise<Record<string, NdArray>> {
    this.open();
    return copied(this.present);
  }

  setParameters(parameters: Arrays): Promise<void> {
    return this.exclusive(async () => this.adopt(checkedParameters(this.manifest, parameters)));
  }

  reset(what: "personal" | "state" | "parameters"): Promise<void> {
    return this.exclusive(async () => {
      if (what === "parameters") {
        this.present = this.bundle.parameters();
        this.published = true;
      } else if (what === "personal") {
        this.device.personal.clear();
      } else if (what === "state") {
        this.device.state.clear();
      } else {
        throw new RuntimeInputError(`reset: expected "personal", "state" or "parameters", got ${JSON.stringify(what)}`);
      }
      this.changed();
    });
  }

  save(slot: string): Promise<void> {
    return this.exclusive(async () => {
      const original = this.bundle.parameters();
      const moved = new Map(
        [...this.present].filter(([name, array]) => !sameBytes(array, original.get(name) as NdArray)),
      );
      const learned = joinNames({ parameter: moved, personal: this.device.personal, state: this.device.state });
      void persistStorage();
      await writeSlot(this.digest, slot, { bundle: this.manifest.name, publisher: this.bundle.publisher }, learned);
    });
  }

  /**
   * Take what `save` kept under this name, or for an earlier version of the model that one of the keys (hexadecimal)
   * signed, if there is something. Raises StorageError, TensorLayoutError.
   */
  restore(slot: string, carry: Carry = "all", publishers: readonly string[] = []): Promise<void> {
    return this.exclusive(async () => {
      let found: Found | null = null;
      try {
        found = await findLearned(this.bundle, slot, carry, publishers);
      } catch (error) {
        this.storageProblem = storageProblem(error);
      }
      if (found === null) return;
      const { groups, restored } = found;
      this.restored = restored;
      this.adopt(checkedParameters(this.manifest, Object.fromEntries(groups.parameter)));
      for (const [name, array] of groups.personal) this.device.personal.set(name, array);
      for (const [name, array] of groups.state) this.device.state.set(name, array);
    });
  }

  pause(): void {
    this.control.pause();
  }

  resume(): void {
    this.control.resume();
  }

  cancel(): void {
    this.control.cancel();
  }

  close(): void {
    if (this.closed) return;
    this.closed = true;
    this.control.cancel();
    void this.turns.take(async () => {
      await this.predictor?.then((predictor) => predictor.release()).catch(() => undefined);
      await this.sessions.close();
    });
  }

  // --- learning ------------------------------------------------------------------------------------------------------

  async fit(options: FitOptions): Promise<History> {
    checkOptions("fit", options);
    return this.training(options.signal, async (run) => {
      const { epochs = 1, batchSize = 32, shuffle = true, seed = 0, checkpointEvery = CHECKPOINT_EVERY } = options;
      const name = options.program ?? needProgram(this.bundle, "train", "learn");
      if (!(Number.isInteger(epochs) && epochs >= 1 && Number.isInteger(batchSize) && batchSize >= 1)) {
        throw new RuntimeInputError(`epochs and batchSize must be at least 1, got ${epochs} and ${batchSize}`);
      }
      if (!(checkpointEvery >= 0)) {
        throw new RuntimeInputError(`checkpointEvery is in seconds, 0 or more; got ${checkpointEvery}`);
      }
      const moves = this.movable(name, options.moves);
      const phase: Phase = { program: name, batch_size: batchSize, epochs, steps: null, moves };
      const fields = collectData(this.bundle, [phase], options.x, options.y);
      checkLabels("fit", this.bundle, fields, options.ignoreLabel);
      const { broadcast, hyperparameters, validation } = options;
      const values = this.values({ broadcast, hyperparameters, seed, examples: fields.count });
      // An error in the validation's data comes now, and not after the first epoch.
      if (validation !== undefined) {
        const asked = collect("validation", evaluationFields(this.bundle), validation.x, validation.y);
        checkLabels("validation", this.bundle, asked, options.ignoreLabel);
      }
      const validate =
        validation === undefined
          ? null
          : async () => {
              const program = needProgram(this.bundle, "evaluate", "be validated");
              const predictor = await this.newPredictor(values);
              try {
                const { x, y } = validation;
                return await evaluate(this.sessions, program, predictor, values, x, y, VALIDATION_BATCH);
              } finally {
                await predictor.release();
              }
            };
      let checkpoint: Checkpoint | null = null;
      if (options.checkpoint !== undefined) {
        const groups = {
          data: fields.arrays,
          parameter: values.start,
          personal: this.device.personal,
          state: this.device.state,
          broadcast: values.broadcast,
        };
        const decisive = [phase, shuffle, seed, Object.entries(hyperparameters ?? {}).sort()];
        checkpoint = new Checkpoint(options.checkpoint, await fingerprint(this.bundle, decisive, groups));
      }
      const { onStep, onEpoch } = options;
      const featureBudget = options.featureCache === false ? 0 : this.featureBudget;
      try {
        const history = await runFit(this.sessions, phase, values, fields, {
          shuffle,
          onStep,
          onEpoch,
          validate,
          run,
          checkpoint,
          checkpointEvery,
          featureBudget,
        });
        this.take(values);
        return history;
      } catch (error) {
        if (error instanceof NonFiniteLossError) this.take(values);
        throw error;
      }
    });
  }

  /** `randomness` is where `noise` comes from; default: the browser's cryptographic generator. */
  async localRound(options: RoundOptions, randomness?: Randomness): Promise<LocalUpdate> {
    checkOptions("localRound", options);
    return this.training(options.signal, async (run) => {
      const { schedule, name } = this.manifest;
      needProgram(this.bundle, "finish", "take part in a round");
      if (!schedule.length) throw new RuntimeProgramError(`bundle ${name} has no schedule, so no local round`);
      const start = options.parameters === undefined ? this.present : completeParameters(this.manifest, options.parameters);
      const fields = collectData(this.bundle, schedule, options.x, options.y);
      checkLabels("localRound", this.bundle, fields, options.ignoreLabel);
      const { broadcast, hyperparameters, seed, onStep } = options;
      const examples = fields.count;
      const inputs = { broadcast, hyperparameters, seed, examples, randomness };
      const values = new Values(this.bundle, start, this.device, inputs);
      await runBegin(this.sessions, values);
      const training = new Training(examples);
      const watch = { onStep, between: () => run.betweenSteps(async () => undefined) };
      await runPhases(this.sessions, schedule, values, fields, training, true, watch, this.featureBudget);
      if (training.stopped) throw new RuntimeInputError("localRound: it was cancelled; a round is whole or rejects");
      const { update, metrics } = await finish(this.sessions, values);
      values.keep();
      this.changed();
      return {
        arrays: update,
        examples: training.examples,
        steps: values.steps,
        metrics: { ...training.metrics.reduced(), ...metrics },
        losses: training.losses,
        parameters: copied(values.parameters),
      };
    });
  }

  // --- inside --------------------------------------------------------------------------------------------------------

  private get featureBudget(): number {
    if (this.memoryLimit === undefined) return DEFAULT_FEATURE_BUDGET;
    return Math.max(0, this.memoryLimit - this.manifest.limits.peak_bytes);
  }

  private open(): void {
    if (this.closed) throw new RuntimeInputError("this runtime is closed; load the bundle again");
  }

  /** One thing that reads or writes the model at a time. */
  private exclusive<T>(work: () => Promise<T>): Promise<T> {
    return this.turns.take(async () => {
      this.open();
      return work();
    });
  }

  private async training<T>(signal: AbortSignal | undefined, work: (run: Run) => Promise<T>): Promise<T> {
    signal?.throwIfAborted();
    return this.control.during((run) => {
      const aborting = (): void => run.abort(signal?.reason);
      signal?.addEventListener("abort", aborting, { once: true });
      return this.exclusive(() => work(run)).finally(() => signal?.removeEventListener("abort", aborting));
    });
  }

  private values(inputs: ConstructorParameters<typeof Values>[3] = {}): Values {
    return new Values(this.bundle, this.present, this.device, inputs);
  }

  private movable(name: string, moves: readonly string[] | undefined): readonly string[] | null {
    const program = this.bundle.program(name);
    if (program.kind !== "train" || program.steps > 1) {
      throw new RuntimeInputError(`fit: ${name} is not a train program of one step`);
    }
    const written = program.outputs.flatMap((port) =>
      port.role === "parameter" || port.role === "personal" ? [port.tensor] : [],
    );
    for (const tensor of moves ?? []) {
      if (!written.includes(tensor)) {
        throw new RuntimeInputError(`moves: ${tensor} is not one that ${name} writes: ${written.join(", ")}`);
      }
    }
    return moves ?? null;
  }

  private take(values: Values): void {
    values.keep();
    this.adopt(values.parameters);
  }

  private adopt(parameters: ReadonlyMap<string, NdArray>): void {
    for (const [name, array] of parameters) {
      if (array !== this.present.get(name)) this.published = false;
      this.present.set(name, array);
    }
    this.changed();
  }

  /** Answers must follow the parameters: the next one makes a new predictor. */
  private changed(): void {
    const old = this.predictor;
    this.predictor = null;
    // Whoever asked before gets an answer before; releasing waits its turn behind that.
    void old?.then((predictor) => predictor.release()).catch(() => undefined);
  }

  private presentPredictor(): Promise<Predictor> {
    this.predictor ??= this.newPredictor();
    return this.predictor;
  }

  /** A predictor of the present model, or of `values` in the middle of a fit. The caller releases it. */
  private async newPredictor(inTheMiddle?: Values): Promise<Predictor> {
    const name = needProgram(this.bundle, "predict", "predict");
    const program = this.bundle.program(name);
    const values = inTheMiddle ?? this.values();
    // Nothing has changed since conversion: the graph's own initializers are right.
    const same = inTheMiddle === undefined && this.isPublished();
    const derived = same ? new Map<string, NdArray>() : await this.derived(values);
    if (!derived.size) return new Predictor(await this.sessions.get(name), program, values, false);
    return new Predictor(await this.sessions.open(name, derived), program, values, true);
  }

  /** Whether no input of `refresh` has changed since conversion. */
  private isPublished(): boolean {
    const refresh = findProgram(this.bundle, "refresh");
    const ports = refresh === null ? [] : this.bundle.program(refresh).inputs;
    const own = ports.some(
      (port) =>
        (port.role === "personal" && this.device.personal.has(port.tensor)) ||
        (port.role === "state" && this.device.state.has(port.tensor)),
    );
    return this.published && !own;
  }

  private async derived(values: Values): Promise<Map<string, NdArray>> {
    const refresh = findProgram(this.bundle, "refresh");
    if (refresh === null) return new Map();
    const program = this.bundle.program(refresh);
    const outputs = await runOnce(this.sessions, refresh, values);
    return new Map(
      program.outputs.flatMap((port) =>
        port.role === "derived" ? [[port.tensor, outputs.get(port.name) as NdArray]] : [],
      ),
    );
  }
}
