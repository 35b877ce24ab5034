/**
 * From a plan to the arrays to upload: fetch, check policy and owner's limits, then train
 * (archipel/client/rounds/work.py).
 */

import type { NdArray } from "../../arrays.js";
import type { Bundle } from "../../bundle/reader.js";
import { writeWeights } from "../../bundle/weights.js";
import { joinNames } from "../../runtime/device_state.js";
import { RuntimeCore } from "../../runtime/runtime.js";
import type { Device, Examples } from "../device.js";
import { type Enrolment, ofLog } from "../enrolment.js";
import type { OwnerLimits } from "../limits.js";
import type { RoundPlan } from "../messages/rounds.js";
import { checkOrigin } from "../origins.js";
import { takeOwnState } from "../own_state.js";
import { checkPlanOrigin } from "../plan_origin.js";
import { checkPlan } from "../policy.js";
import { checkPublished } from "../storage/books.js";
import type { Files } from "../storage/files.js";
import type { Arrays } from "../updates/bounds.js";
import type { Layout } from "../updates/layout.js";
import { planLayout, uploadArrays } from "../updates/uploads.js";
import type { DeviceSession } from "./session.js";

const CHECK_MS = 250;

/** Everything that a round needs, verified. It starts from `parameters`. */
export interface Prepared {
  readonly bundle: Bundle;
  readonly layout: Layout;
  /** The root's plan, of which the round is a part; null: the server's own. */
  readonly origin: RoundPlan | null;
  readonly parameters: Arrays;
}

/**
 * Fetch the plan's bundle, if owner and publisher allow the plan. The caller has checked the plan itself against the
 * owner's limits.
 *
 * Raises OwnerRefusalError, BundleError, PolicyError, another ProtocolError, RefusedError or UnreachableError.
 */
export async function prepareBundle(
  plan: RoundPlan,
  device: Device,
  enrolment: Enrolment,
  files: Files,
  limits: OwnerLimits,
): Promise<Pick<Prepared, "bundle" | "layout" | "origin">> {
  // Each check comes as soon as what it needs is here: the publisher's and the owner's limits on the manifest before
  // the weights, and the weights' origin before any graph runs.
  const bundle = await files.bundle(plan.bundle, enrolment.publisherKeys);
  await checkPublished(device.database, bundle, enrolment.population, Date.now() / 1000);
  const layout = planLayout(plan, bundle.manifest);
  limits.checkBundle(plan, bundle.manifest, layout);
  checkPlan(plan, bundle.manifest.privacy, layout);
  const origin = await checkPlanOrigin(plan, bundle.manifest, enrolment.root ?? null);
  return { bundle, layout, origin };
}

/** Fetch the plan's bundle and weights, and check the weights' origin. Raises as `prepareBundle`. */
export async function prepare(
  plan: RoundPlan,
  device: Device,
  enrolment: Enrolment,
  files: Files,
  session: DeviceSession,
  limits: OwnerLimits,
): Promise<Prepared> {
  const { bundle, layout, origin } = await prepareBundle(plan, device, enrolment, files, limits);
  const weights = await files.weights(plan.weights);
  const given = { digest: plan.weights, tensors: weights };
  const find = (digest: string) => files.keptWeights(digest);
  const log = ofLog(enrolment, bundle.manifest);
  await checkOrigin(device.database, bundle, given, find, session, log, plan.task_id);
  return { bundle, layout, origin, parameters: Object.fromEntries(weights) };
}

/** What the device uploads, by output name, and how it was made; `state` is null where the device keeps none. */
export interface Contribution {
  readonly arrays: Arrays;
  readonly examples: number;
  readonly steps: number;
  readonly loss: number | null;
  readonly state: Uint8Array | null;
}

/**
 * Train as the plan says. Raises RuntimeInputError, RuntimeProgramError, NonFiniteLossError, or what the gate raises.
 */
export async function contribute(
  { bundle, parameters }: Prepared,
  plan: RoundPlan,
  digest: string,
  fields: Examples,
  device: Device,
): Promise<Contribution> {
  const { manifest } = bundle;
  const seed = await device.vault.roundSeed(digest);
  const runtime = new RuntimeCore(bundle, await device.engine(), device.config.maxPeakBytes);
  try {
    await takeOwnState(runtime, bundle, device);
    let next = performance.now();
    const update = await runtime.localRound({
      x: fields,
      seed,
      parameters,
      hyperparameters: plan.hyperparameters,
      // Not after each step: to ask the page takes longer than a step of a small model.
      onStep: async () => {
        if (performance.now() < next) return;
        await device.gate.passOrWait();
        next = performance.now() + CHECK_MS;
      },
    });
    const arrays = uploadArrays(manifest, plan.program, update.arrays, update.metrics);
    const { personal, state } = runtime.device;
    const kept = personal.size || state.size ? writeWeights(joinNames({ personal, state })) : null;
    const loss = update.losses.at(-1) ?? null;
    return { arrays, examples: update.examples, steps: update.steps, loss, state: kept };
  } finally {
    runtime.close();
  }
}

/** How many examples there are; the runtime refuses fields of different lengths. */
export function countExamples(fields: Examples): number {
  return Math.max(0, ...Object.values(fields).map((array: NdArray) => array.dims[0] ?? 0));
}
