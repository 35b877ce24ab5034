/** The page's side of the worker: a Runtime whose every call is a message. One worker serves all runtimes of a page. */

import type { EvaluateOptions, FitOptions, RoundOptions, Runtime } from "../api.js";
import type { NdArray } from "../arrays.js";
import type { Manifest } from "../bundle/manifest.js";
import type { CoreOptions } from "../core.js";
import { errorOf } from "../errors.js";
import { checkChoice, type Delegate, webGpuObstacle } from "../runtime/delegates.js";
import { type Arrays, isArray } from "../runtime/fields.js";
import type { EpochProgress, History, LocalUpdate, Progress } from "../runtime/results.js";
import { checkOptions } from "../options.js";
import { abortable } from "../fetching.js";
import type { Restored } from "../runtime/restoring.js";
import { persistStorage } from "../storage/persistence.js";
import type { FromWorker, Loaded, Request, Signal, ToWorker } from "./messages.js";

interface Watchers {
  readonly signal?: AbortSignal | undefined;
  readonly onStep?: ((progress: Progress) => unknown) | undefined;
  readonly onEpoch?: ((progress: EpochProgress) => unknown) | undefined;
}

interface Pending extends Watchers {
  readonly core: number;
  /** What the call rejects with, whatever the worker makes of it. */
  aborted: { readonly reason: unknown } | null;
  /** The page's functions that are at work. */
  watching: Promise<unknown>;
  readonly resolve: (result: never) => void;
  readonly reject: (error: unknown) => void;
}

/** Load in the page's worker, which is started if there is none: the one with WebGPU where the page can have that. */
export async function loadInWorker(
  file: Uint8Array,
  options: CoreOptions,
  signal: AbortSignal | undefined,
): Promise<Runtime> {
  const choice = checkChoice(options.delegate);
  const gpu = choice !== "wasm" && (await webGpuObstacle(choice)) === null;
  const link = WorkerLink.shared(gpu ? "webgpu" : "wasm");
  const core = link.enter();
  try {
    const loading = link.call<Loaded>(core, { method: "load", file, options });
    const loaded = await abortable(loading, signal, () => link.leave(core));
    return new RuntimeProxy(link, core, loaded);
  } catch (error) {
    link.leave(core);
    throw error;
  }
}

class WorkerLink {
  /** No number is given twice in a page, so that what is closed stays closed. */
  private static next = 0;
  private static readonly present = new Map<Delegate, WorkerLink>();
  private readonly worker: Worker;
  private readonly pending = new Map<number, Pending>();
  private readonly cores = new Set<number>();
  private readonly reasons = new Map<number, string>();

  static shared(build: Delegate): WorkerLink {
    const link = WorkerLink.present.get(build) ?? new WorkerLink(build);
    WorkerLink.present.set(build, link);
    return link;
  }

  private constructor(private readonly build: Delegate) {
    // Bundlers look for these very words; webpack makes one script of workers of the same name.
    this.worker =
      build === "wasm"
        ? new Worker(new URL("./wasm.js", import.meta.url), { type: "module", name: "archipel-wasm" })
        : new Worker(new URL("./webgpu.js", import.meta.url), { type: "module", name: "archipel-webgpu" });
    this.worker.onmessage = ({ data }: MessageEvent<FromWorker>) => this.receive(data);
    this.worker.onerror = (event) => this.fail(`the worker stopped: ${event.message || "its script cannot be loaded"}`);
  }

  /** A number for one more runtime. */
  enter(): number {
    const core = WorkerLink.next++;
    this.cores.add(core);
    return core;
  }

  /** One runtime less; without any the worker ends, and its memory goes back. */
  leave(core: number): void {
    if (!this.cores.delete(core)) return;
    this.reasons.delete(core);
    this.signal(core, "close");
    for (const [call, each] of this.pending) {
      if (each.core !== core) continue;
      this.pending.delete(call);
      each.reject(errorOf("RuntimeInputError", "this runtime was closed"));
    }
    if (!this.cores.size) this.end();
  }

  call<T>(core: number, request: Request, { signal, ...watchers }: Watchers = {}): Promise<T> {
    if (signal?.aborted) return Promise.reject(signal.reason);
    if (!this.cores.has(core)) {
      return Promise.reject(errorOf("RuntimeInputError", "this runtime is closed; load the bundle again"));
    }
    const call = WorkerLink.next++;
    const aborting = (): void => this.abort(call, signal?.reason);
    signal?.addEventListener("abort", aborting, { once: true });
    return new Promise<T>((resolve, reject) => {
      const given = { ...watchers, core, aborted: null, watching: Promise.resolve() };
      this.pending.set(call, { ...given, resolve: resolve as (result: never) => void, reject });
      try {
        this.post({ type: "call", call, core, request });
      } catch (error) {
        // What is no array, as far as messages can tell.
        this.pending.delete(call);
        reject(errorOf("RuntimeInputError", `${request.method}: cannot be sent to the worker: ${String(error)}`));
      }
    }).finally(() => signal?.removeEventListener("abort", aborting));
  }

  private abort(call: number, reason: unknown): void {
    const pending = this.pending.get(call);
    if (pending === undefined) return;
    pending.aborted ??= { reason };
    this.post({ type: "abort", call });
  }

  /** Why runtime `core` runs where it does, as of its last answer. */
  reason(core: number): string {
    return this.reasons.get(core) ?? "";
  }

  signal(core: number, signal: Signal): void {
    this.post({ type: "signal", core, signal });
  }

  private post(message: ToWorker): void {
    this.worker.postMessage(message);
  }

  private receive(message: FromWorker): void {
    const { call } = message;
    const pending = this.pending.get(call);
    if (pending === undefined) return;
    switch (message.type) {
      case "step":
        this.watch(call, pending, async () => {
          if ((await pending.onStep?.(message.progress)) === true) this.signal(pending.core, "cancel");
        });
        break;
      case "epoch":
        this.watch(call, pending, async () => pending.onEpoch?.(message.progress));
        break;
      case "result":
        this.reasons.set(pending.core, message.delegateReason);
        void this.settle(call, pending, () => pending.resolve(message.result as never));
        break;
      case "error":
        void this.settle(call, pending, () => pending.reject(errorOf(message.name, message.message)));
    }
  }

  /** Call the page's function; one that raises an error ends the call with it, and is not called again. */
  private watch(call: number, pending: Pending, work: () => Promise<unknown>): void {
    if (pending.aborted !== null) return;
    const done = work().catch((error: unknown) => this.abort(call, error));
    pending.watching = Promise.all([pending.watching, done]);
  }

  private async settle(call: number, pending: Pending, settled: () => void): Promise<void> {
    await pending.watching;
    if (!this.pending.delete(call)) return;
    if (pending.aborted === null) settled();
    else pending.reject(pending.aborted.reason);
  }

  private fail(what: string): void {
    for (const each of this.pending.values()) each.reject(errorOf("RuntimeProgramError", what));
    this.pending.clear();
    this.cores.clear();
    this.end();
  }

  private end(): void {
    this.worker.terminate();
    if (WorkerLink.present.get(this.build) === this) WorkerLink.present.delete(this.build);
  }
}

class RuntimeProxy implements Runtime {
  readonly manifest: Manifest;
  readonly digest: string;
  readonly delegate: Delegate;
  readonly restored: Restored | null;
  readonly storageProblem: string | null;

  constructor(
    private readonly link: WorkerLink,
    private readonly core: number,
    loaded: Loaded,
  ) {
    this.manifest = loaded.manifest;
    this.digest = loaded.digest;
    this.delegate = loaded.delegate;
    this.restored = loaded.restored;
    this.storageProblem = loaded.storageProblem;
  }

  get delegateReason(): string {
    return this.link.reason(this.core);
  }

  predict(x: NdArray): Promise<NdArray>;
  predict(x: Arrays): Promise<Record<string, NdArray>>;
  predict(x: NdArray | Arrays): Promise<never> {
    return this.link.call(this.core, { method: "predict", x: compact(x) });
  }

  async fit(given: FitOptions): Promise<History> {
    checkOptions("fit", given);
    const { onStep, onEpoch, signal, ...options } = given;
    const watched = onStep !== undefined || onEpoch !== undefined;
    const { validation } = options;
    const request = {
      ...compactData(options),
      ...(validation === undefined ? {} : { validation: compactData(validation) }),
      watched,
    };
    return this.link.call(this.core, { method: "fit", options: request }, { onStep, onEpoch, signal });
  }

  async evaluate(options: EvaluateOptions): Promise<Record<string, number>> {
    checkOptions("evaluate", options);
    return this.link.call(this.core, { method: "evaluate", options: compactData(options) });
  }

  async localRound(given: RoundOptions): Promise<LocalUpdate> {
    checkOptions("localRound", given);
    const { onStep, signal, ...options } = given;
    const request = { ...compactData(options), watched: onStep !== undefined };
    return this.link.call(this.core, { method: "localRound", options: request }, { onStep, signal });
  }

  parameters(): Promise<Record<string, NdArray>> {
    return this.link.call(this.core, { method: "parameters" });
  }

  setParameters(parameters: Arrays): Promise<void> {
    return this.link.call(this.core, { method: "setParameters", parameters: compact(parameters) as Arrays });
  }

  reset(what: "personal" | "state" | "parameters"): Promise<void> {
    return this.link.call(this.core, { method: "reset", what });
  }

  save(slot: string): Promise<void> {
    void persistStorage();
    return this.link.call(this.core, { method: "save", slot });
  }

  pause(): void {
    this.link.signal(this.core, "pause");
  }

  resume(): void {
    this.link.signal(this.core, "resume");
  }

  cancel(): void {
    this.link.signal(this.core, "cancel");
  }

  close(): void {
    this.link.leave(this.core);
  }
}

function compactData<T extends { readonly x: NdArray | Arrays; readonly y?: NdArray | null | undefined }>(data: T): T {
  return { ...data, x: compact(data.x), ...(data.y ? { y: compact(data.y) } : {}) };
}

/** A message copies whole buffers: of an array that is a small part of a large one only that part is to travel. */
function compact<T extends NdArray | Arrays>(x: T): T {
  if (typeof x !== "object" || x === null) return x;
  if (isArray(x)) {
    const whole = x.data.byteLength === x.data.buffer.byteLength;
    return { dtype: x.dtype, dims: x.dims, data: whole ? x.data : x.data.slice() } as T;
  }
  return Object.fromEntries(Object.entries(x).map(([name, array]) => [name, compact(array as NdArray)])) as T;
}
