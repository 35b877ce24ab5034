/** How much the noise that a device adds protects one of its examples (archipel/client/memory/privacy.py). */

import type { Manifest, Phase } from "../bundle/manifest.js";
import type { Noise, Program } from "../bundle/roles.js";
import { finishProgram } from "./updates/uploads.js";

export const DELTA = 1e-6;

export interface Noised {
  readonly noise: "none" | "added";
  /** Zero-concentrated differential privacy: what the round costs one example; 0 where the manifest does not say. */
  readonly rho: number;
}

/** Of a training round over so many examples. `program` is the plan's. Raises ProtocolError. */
export function noiseOf(manifest: Manifest, program: string, examples: number): Noised {
  const last = multiplier(finishProgram(manifest, program));
  // Noise on everything that is sent also covers the training steps before it (post-processing).
  if (last) return { noise: "added", rho: rhoOf(last) };
  const noises = manifest.schedule.map(
    (phase) => [multiplier(manifest.programs[phase.program] as Program), passesOf(phase, examples)] as const,
  );
  if (last === null && noises.every(([each]) => each === null)) return { noise: "none", rho: 0 };
  // One phase without noise, or without a stated multiplier, leaves the whole round without a bound.
  const stated = last === null && noises.every(([each]) => Boolean(each));
  const rho = stated ? noises.reduce((sum, [each, passes]) => sum + passes * rhoOf(each as number), 0) : 0;
  return { noise: "added", rho };
}

/**
 * An epsilon for which rho-zCDP implies (epsilon, delta)-differential privacy: the least bound over Renyi orders by
 * proposition 12 of Canonne, Kamath and Steinke 2020. Every order gives a valid bound, so the grid costs tightness
 * only.
 */
export function epsilonOf(rho: number, delta = DELTA): number {
  if (!rho) return 0;
  let least = Number.POSITIVE_INFINITY;
  for (let index = 0; index <= 4000; index++) {
    const above = 10 ** (-3 + (9 * index) / 4000);
    const bound = rho * (1 + above) + (-Math.log(delta) - Math.log1p(above)) / above + Math.log(above / (1 + above));
    least = Math.min(least, bound);
  }
  return Math.max(0, least);
}

function rhoOf(noise: number): number {
  return 1 / (2 * noise ** 2);
}

/** The least multiplier of the program's noise inputs: null without any, 0 if one of them does not state it. */
function multiplier(program: Program): number | null {
  const ports = program.inputs.filter((port): port is Noise => port.role === "noise");
  return ports.length ? Math.min(...ports.map((port) => port.multiplier)) : null;
}

/** The most minibatches of the phase that contain any one example. */
function passesOf(phase: Phase, examples: number): number {
  if (phase.epochs !== null) return phase.epochs;
  // A begun pass counts as a whole one. To round down the batches of a pass can only raise the number of passes.
  return Math.ceil((phase.steps ?? 0) / Math.max(1, Math.floor(examples / phase.batch_size)));
}
