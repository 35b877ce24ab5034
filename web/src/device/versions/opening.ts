/** A version of a model as a runtime, with what the device keeps for itself of that model. */

import { isFinite } from "../../arrays.js";
import type { Bundle } from "../../bundle/reader.js";
import { SelfTestError } from "../../errors.js";
import { findProgram } from "../../runtime/driver.js";
import { RuntimeCore } from "../../runtime/runtime.js";
import { selfTest, someExamples } from "../../runtime/self_test.js";
import type { Device } from "../device.js";
import { takeOwnState } from "../own_state.js";
import type { Tensors } from "../steps/distances.js";

/** A verified version; `weights` are all of its parameters, null where they are the bundle's own. */
export interface Content {
  readonly version: number;
  readonly bundle: Bundle;
  readonly weights: Tensors | null;
}

/**
 * A runtime of the version, with this device's personal tensors and state of the model, as far as they fit it. The
 * caller closes it.
 *
 * With `tested` it has passed the publisher's self-test, and has given finite answers with everything in place. Raises
 * RuntimeLimitError, RuntimeProgramError, RuntimeInputError (weights that are not the bundle's), SelfTestError.
 */
export async function openContent(
  { bundle, weights }: Content,
  device: Device,
  { tested }: { readonly tested: boolean },
): Promise<RuntimeCore> {
  const runtime = new RuntimeCore(bundle, await device.engine(), device.config.maxPeakBytes);
  try {
    // The vectors belong to the published parameters, so this comes before all others.
    if (tested && bundle.manifest.self_test !== null) {
      const wrong = await selfTest(runtime, bundle, () => runtime);
      if (wrong !== null) throw wrong;
    }
    await takeOwnState(runtime, bundle, device);
    await runtime.setParameters(Object.fromEntries(weights ?? []));
    if (tested) await answerSomething(runtime, bundle);
    return runtime;
  } catch (error) {
    runtime.close();
    throw error;
  }
}

async function answerSomething(runtime: RuntimeCore, bundle: Bundle): Promise<void> {
  const name = findProgram(bundle, "predict");
  if (name === null) return;
  const answers = await runtime.predict(someExamples(bundle.program(name)));
  for (const [output, array] of Object.entries(answers)) {
    if (!isFinite(array)) throw new SelfTestError(`self-test: output '${output}' is not finite`);
  }
}

