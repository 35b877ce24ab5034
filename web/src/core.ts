/** Loading a bundle on this thread: verify it, choose what runs it, bring back what was learned. */

import type { LoadOptions } from "./api.js";
import { hex } from "./bundle/digests.js";
import { type Bundle, openBundle } from "./bundle/reader.js";
import { RuntimeInputError } from "./errors.js";
import { type Builds, checkChoice, type Engine, openEngine, withoutWebGpu } from "./runtime/delegates.js";
import { comparePaces } from "./runtime/pace.js";
import { checkBundle, RuntimeCore } from "./runtime/runtime.js";
import { selfTest } from "./runtime/self_test.js";

/** What is left of the options when functions and defaults are out of them. */
export type CoreOptions = Omit<LoadOptions, "worker" | "trustedKeys" | "signal" | "onProgress"> & {
  readonly trustedKeys: readonly Uint8Array[];
};

/** Raises the BundleError that says what is wrong, RuntimeLimitError, RuntimeProgramError or StorageError. */
export async function loadCore(file: Uint8Array, options: CoreOptions, builds: Builds): Promise<RuntimeCore> {
  const choice = checkChoice(options.delegate);
  const { carry = "all" } = options;
  if (!["all", "personal", "nothing"].includes(carry)) {
    throw new RuntimeInputError(`carry: expected "all", "personal" or "nothing", got ${JSON.stringify(carry)}`);
  }
  const bundle = await openBundle(file, options.trustedKeys, options.allowDevelopment);
  checkBundle(bundle, options.memoryLimit);
  const engine = await openEngine(choice, options.threads ?? 1, builds);
  let core = new RuntimeCore(bundle, engine, options.memoryLimit);
  if (engine.delegate === "webgpu") core = await onBetter(core, bundle, engine, options);
  if (options.slot !== undefined) await core.restore(options.slot, carry, options.trustedKeys.map(hex));
  return core;
}

/** `core`, or one on WebAssembly where "auto" finds that WebGPU is wrong or slower. Raises the self-test's error. */
async function onBetter(
  core: RuntimeCore,
  bundle: Bundle,
  engine: Engine,
  { delegate = "auto", memoryLimit }: CoreOptions,
): Promise<RuntimeCore> {
  const other = (reason: string): RuntimeCore =>
    new RuntimeCore(bundle, withoutWebGpu(engine, reason), memoryLimit);
  const wrong = await selfTest(core, bundle, () => other("to compare with"));
  if (wrong !== null) {
    core.close();
    if (delegate === "webgpu") throw wrong;
    return other(`WebGPU: ${wrong.message}`);
  }
  if (delegate === "webgpu") return core;
  const reference = other("to compare with");
  const paces = await comparePaces(bundle, core, reference);
  reference.close();
  const { what, first, second } = paces ?? { what: "step", first: 0, second: 1 };
  const measured = `a training ${what} takes ${first.toFixed(2)} ms on WebGPU, ${second.toFixed(2)} ms on WebAssembly`;
  const reason = what === "step" ? measured : measured.replace("a training answer", "an answer");
  if (first <= second) return paces === null ? core : core.because(reason);
  core.close();
  return other(reason);
}
