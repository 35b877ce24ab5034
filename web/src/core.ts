/** Loading a bundle on this thread: verify it, choose what runs it, bring back what was learned. */

import type { LoadOptions } from "./api.js";
import { openBundle } from "./bundle/reader.js";
import { RuntimeInputError } from "./errors.js";
import { type DelegateChoice, openEngine, withoutWebGpu } from "./runtime/delegates.js";
import { checkBundle, RuntimeCore } from "./runtime/runtime.js";
import { selfTest } from "./runtime/self_test.js";

/** What is left of the options when functions and defaults are out of them. */
export type CoreOptions = Omit<LoadOptions, "worker" | "trustedKeys"> & { readonly trustedKeys: readonly Uint8Array[] };

/** Raises the BundleError that says what is wrong, RuntimeLimitError, RuntimeProgramError or StorageError. */
export async function loadCore(file: Uint8Array, options: CoreOptions): Promise<RuntimeCore> {
  const choice: DelegateChoice = options.delegate ?? "auto";
  if (!["auto", "wasm", "webgpu"].includes(choice)) {
    throw new RuntimeInputError(`delegate: expected "auto", "wasm" or "webgpu", got ${JSON.stringify(choice)}`);
  }
  const bundle = await openBundle(file, options.trustedKeys, options.allowDevelopment);
  checkBundle(bundle, options.memoryLimit);
  const engine = await openEngine(choice, options.threads ?? 1);
  let core = new RuntimeCore(bundle, engine, options.memoryLimit);
  if (engine.delegate === "webgpu") {
    const onWasm = withoutWebGpu(engine, "to compare with");
    const wrong = await selfTest(core, bundle, () => new RuntimeCore(bundle, onWasm, options.memoryLimit));
    if (wrong !== null && choice === "webgpu") {
      core.close();
      throw wrong;
    }
    if (wrong !== null) {
      core.close();
      core = new RuntimeCore(bundle, withoutWebGpu(engine, `WebGPU: ${wrong.message}`), options.memoryLimit);
    }
  }
  if (options.slot !== undefined) await core.restore(options.slot);
  return core;
}
