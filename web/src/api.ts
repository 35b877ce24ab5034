/** The library's interface: what `load` takes and what it gives. */

import type { NdArray } from "./arrays.js";
import type { Manifest } from "./bundle/manifest.js";
import type { Delegate, DelegateChoice } from "./runtime/delegates.js";
import type { Arrays } from "./runtime/fields.js";
import type { Carry, Restored } from "./runtime/restoring.js";
import type { DownloadProgress } from "./source.js";
import type { EpochProgress, History, LocalUpdate, Progress } from "./runtime/results.js";

export interface LoadOptions {
  /** Ed25519 public keys, raw (32 bytes) or as 64 hexadecimal digits; one of them must have signed the bundle. */
  readonly trustedKeys: readonly (Uint8Array | string)[];
  /** Whether a development key may have signed it; these are for trying out only. Default: no. */
  readonly allowDevelopment?: boolean | undefined;
  /** Bytes; a bundle that declares to need more is refused, and features are cached within what is left. */
  readonly memoryLimit?: number | undefined;
  /** "auto": WebGPU where it works and answers as the bundle's self-test says, else WebAssembly. */
  readonly delegate?: DelegateChoice | undefined;
  /** Threads inside one operator, for WebAssembly on pages that are cross-origin isolated; elsewhere there is one. */
  readonly threads?: number | undefined;
  /** Run beside the page's own thread. Default: on pages, not in Node or in a worker. */
  readonly worker?: boolean | undefined;
  /**
   * Take what `save` kept under this name for the same bundle; if there is nothing, what it kept for the newest earlier
   * version of the model (`carry`). Where the browser keeps nothing, the model is as published: see `storageProblem`.
   */
  readonly slot?: string | undefined;
  /**
   * What goes on with a new version of a model, which is a bundle of the same name, signed by one of `trustedKeys`:
   * "all" (the default) that fits it, as `restored` tells; "personal" leaves the parameters to the new version and takes
   * personal tensors and the device's state, as devices in federations do; or "nothing".
   */
  readonly carry?: Carry | undefined;
  /** Ends loading; `load` then rejects with the signal's reason. */
  readonly signal?: AbortSignal | undefined;
  /** Called as parts of the bundle come from an address or a Response. */
  readonly onProgress?: ((progress: DownloadProgress) => unknown) | undefined;
}

export interface FitOptions {
  /** The array of the only example field, or arrays by field name; first axis = examples. */
  readonly x: NdArray | Arrays;
  /** The array of the only label field. */
  readonly y?: NdArray | null | undefined;
  readonly epochs?: number | undefined;
  readonly batchSize?: number | undefined;
  readonly shuffle?: boolean | undefined;
  /** 0 ... 2^32 - 1; decides the order of the examples and what programs draw. */
  readonly seed?: number | undefined;
  readonly hyperparameters?: Readonly<Record<string, number>> | undefined;
  /** Evaluated after every epoch. */
  readonly validation?: { readonly x: NdArray | Arrays; readonly y?: NdArray | null | undefined } | undefined;
  /** Called after every step; returning true ends training (from a worker, some steps later). */
  readonly onStep?: ((progress: Progress) => unknown) | undefined;
  /** Called after every pass over the data. */
  readonly onEpoch?: ((progress: EpochProgress) => unknown) | undefined;
  /**
   * A name in IndexedDB. The fit writes there where it stands; the same call finds it after an interruption and goes on,
   * with the result of an uninterrupted run.
   */
  readonly checkpoint?: string | undefined;
  /** Seconds between two checkpoints. */
  readonly checkpointEvery?: number | undefined;
  /** Keep what a frozen backbone makes of each example, within the memory limit. */
  readonly featureCache?: boolean | undefined;
  /** The parameters and personal tensors that change; default: all that the program writes. */
  readonly moves?: readonly string[] | undefined;
  readonly program?: string | undefined;
  readonly broadcast?: Arrays | undefined;
  /** A label that counts for nothing, though it is no class: the `ignore_index` of the bundle's loss. */
  readonly ignoreLabel?: number | undefined;
  /** Ends training: `fit` then rejects with the signal's reason, and the runtime is as before. */
  readonly signal?: AbortSignal | undefined;
}

export interface EvaluateOptions {
  /** The example fields of `predict`; a record may hold the labels and weights of `evaluate` too. */
  readonly x: NdArray | Arrays;
  readonly y?: NdArray | null | undefined;
  readonly batchSize?: number | undefined;
  /** As for `fit`. */
  readonly ignoreLabel?: number | undefined;
}

export interface RoundOptions {
  readonly x: NdArray | Arrays;
  readonly y?: NdArray | null | undefined;
  readonly seed: number;
  readonly broadcast?: Arrays | undefined;
  readonly hyperparameters?: Readonly<Record<string, number>> | undefined;
  /** All parameters to start from; default: the present ones. */
  readonly parameters?: Arrays | undefined;
  readonly onStep?: ((progress: Progress) => unknown) | undefined;
  /** As for `fit`. */
  readonly ignoreLabel?: number | undefined;
  readonly signal?: AbortSignal | undefined;
}

/** A bundle that predicts, evaluates and keeps learning in this browser. */
export interface Runtime {
  readonly manifest: Manifest;
  /** Hex SHA-256 of the manifest, and so of everything in the bundle. */
  readonly digest: string;
  /** What is really used. */
  readonly delegate: Delegate;
  /** Why that one, and which programs it could not run. */
  readonly delegateReason: string;
  /** What `slot` has brought; null where nothing was saved, or no slot was asked for. */
  readonly restored: Restored | null;
  /** Why the browser lets this page keep nothing, as far as `slot` has asked; null otherwise. */
  readonly storageProblem: string | null;
  /** Array in, array out for a program with one example field and one output; record in, record out by output name. */
  predict(x: NdArray): Promise<NdArray>;
  predict(x: Arrays): Promise<Record<string, NdArray>>;
  /**
   * Learn from local data with the bundle's train program; nothing leaves the device.
   *
   * Rejects with RuntimeInputError, CheckpointError, what a callback raises, or NonFiniteLossError after keeping the last
   * weights whose loss was finite; any other error leaves the runtime as it was.
   */
  fit(options: FitOptions): Promise<History>;
  /**
   * Measure what `predict` answers on labelled examples, with the present parameters: the bundle's metrics by name.
   *
   * Rejects with RuntimeInputError for arrays that do not fit, RuntimeProgramError without an `evaluate` program.
   */
  evaluate(options: EvaluateOptions): Promise<Record<string, number>>;
  /** One device's part of a federated round: `begin`, the bundle's schedule, `finish`. Parameters stay as they are. */
  localRound(options: RoundOptions): Promise<LocalUpdate>;
  /** The present global parameters by name. */
  parameters(): Promise<Record<string, NdArray>>;
  /** Replace some or all parameters. */
  setParameters(parameters: Arrays): Promise<void>;
  /** Forget the personal tensors, the device's state, or go back to the bundle's own parameters. */
  reset(what: "personal" | "state" | "parameters"): Promise<void>;
  /**
   * Keep what was learned in IndexedDB, under this name for this bundle; durable when it resolves. The first one asks the
   * browser not to clear this site's storage by itself (`persistStorage`). Rejects with StorageError.
   */
  save(slot: string): Promise<void>;
  /** Hold training between two steps; a fit with a checkpoint writes it first. */
  pause(): void;
  resume(): void;
  /** End training after the present step, paused or not: `fit` resolves with what it has learned. */
  cancel(): void;
  /** Free everything. Nothing can be called afterwards. */
  close(): void;
}
