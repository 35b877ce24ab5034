/** What a page and its worker say to each other. */

import type { NdArray } from "../arrays.js";
import type { Manifest } from "../bundle/manifest.js";
import type { CoreOptions } from "../core.js";
import type { Delegate } from "../runtime/delegates.js";
import type { Arrays } from "../runtime/fields.js";
import type { Restored } from "../runtime/restoring.js";
import type { EpochProgress, Progress } from "../runtime/results.js";
import type { EvaluateOptions, FitOptions, RoundOptions } from "../api.js";

/** Functions stay on the page; the worker is told whether there are any. */
export type FitRequest = Omit<FitOptions, "onStep" | "onEpoch" | "signal"> & { readonly watched: boolean };
export type RoundRequest = Omit<RoundOptions, "onStep" | "signal"> & { readonly watched: boolean };

export interface Loaded {
  readonly manifest: Manifest;
  readonly digest: string;
  readonly delegate: Delegate;
  readonly restored: Restored | null;
  readonly storageProblem: string | null;
}

/** What can be asked of runtime `core`. */
export type Request =
  | { readonly method: "load"; readonly file: Uint8Array; readonly options: CoreOptions }
  | { readonly method: "predict"; readonly x: NdArray | Arrays }
  | { readonly method: "fit"; readonly options: FitRequest }
  | { readonly method: "evaluate"; readonly options: EvaluateOptions }
  | { readonly method: "localRound"; readonly options: RoundRequest }
  | { readonly method: "parameters" }
  | { readonly method: "setParameters"; readonly parameters: Arrays }
  | { readonly method: "reset"; readonly what: "personal" | "state" | "parameters" }
  | { readonly method: "save"; readonly slot: string };

export type Signal = "pause" | "resume" | "cancel" | "close";

export type ToWorker =
  | { readonly type: "call"; readonly call: number; readonly core: number; readonly request: Request }
  /** Ends a call as if it had not been made. */
  | { readonly type: "abort"; readonly call: number }
  | { readonly type: "signal"; readonly core: number; readonly signal: Signal };

export type FromWorker =
  | { readonly type: "result"; readonly call: number; readonly result: unknown; readonly delegateReason: string }
  | { readonly type: "error"; readonly call: number; readonly name: string; readonly message: string }
  | { readonly type: "step"; readonly call: number; readonly progress: Progress }
  | { readonly type: "epoch"; readonly call: number; readonly progress: EpochProgress };

/** The buffers of all arrays in a value, each once: what can be handed over instead of copied. */
export function buffersOf(value: unknown, found = new Set<ArrayBuffer>()): Set<ArrayBuffer> {
  if (ArrayBuffer.isView(value)) {
    if (value.buffer instanceof ArrayBuffer) found.add(value.buffer);
  } else if (typeof value === "object" && value !== null) {
    for (const part of Object.values(value)) buffersOf(part, found);
  }
  return found;
}
