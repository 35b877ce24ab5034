/** archipel in the browser: load a signed bundle; predict, evaluate and keep learning where the data is. */

import type { LoadOptions, Runtime } from "./api.js";
import { abortable } from "./fetching.js";
import { checkOptions } from "./options.js";
import { keyBytes, readSource, type Source } from "./source.js";
import { loadInWorker } from "./worker/proxy.js";

export type { EvaluateOptions, FitOptions, LoadOptions, RoundOptions, Runtime } from "./api.js";
export type { NdArray, TypedArray } from "./arrays.js";
export type { Manifest, Phase, TensorSpec } from "./bundle/manifest.js";
export type { Program, Port } from "./bundle/roles.js";
export * from "./errors.js";
export type { Delegate, DelegateChoice } from "./runtime/delegates.js";
export type { Arrays } from "./runtime/fields.js";
export type { EpochProgress, History, LocalUpdate, Progress } from "./runtime/results.js";
export type { Carry, Restored } from "./runtime/restoring.js";
export type { DownloadProgress, Source } from "./source.js";
export { persistStorage } from "./storage/persistence.js";
export { deleteSlot, exportSlot, listSlots, type SavedSlot } from "./storage/slots.js";

/**
 * Open a bundle that one of `trustedKeys` signed.
 *
 * Rejects with the BundleError that says what is wrong with it, RuntimeInputError for options that are none,
 * RuntimeLimitError, RuntimeProgramError or StorageError; with the reason of `signal`, or what `onProgress` raises.
 */
export async function load(source: Source, options: LoadOptions): Promise<Runtime> {
  checkOptions("load", options);
  // Only a page has a thread to keep free; ONNX Runtime gives Node a Worker of another kind.
  const { worker = typeof document === "object" && typeof Worker === "function", ...others } = options;
  const { trustedKeys, signal, onProgress, ...rest } = others;
  const core = { ...rest, trustedKeys: keyBytes(trustedKeys) };
  const file = await readSource(source, { signal, onProgress });
  if (worker) return loadInWorker(file, core, signal);
  // Chunks of their own: a page that has a worker never fetches them.
  const [{ loadCore }, { BUILDS }] = await Promise.all([import("./core.js"), import("./runtime/builds.js")]);
  const loading = loadCore(file, core, BUILDS);
  return abortable(loading, signal, () => void loading.then((late) => late.close()).catch(() => undefined));
}
