/** The bundles of fixtures/ with what the Python runtime and PyTorch make of them; make_fixtures.py writes both. */

import { createHash } from "node:crypto";
import { readFileSync } from "node:fs";

import { expect } from "vitest";

import type { NdArray } from "../src/arrays.js";
import { readWeights } from "../src/bundle/weights.js";
import { loadCore } from "../src/core.js";
import type { LoadOptions } from "../src/index.js";
import { BUILDS } from "../src/runtime/builds.js";
import type { Randomness } from "../src/runtime/noise.js";
import type { RuntimeCore } from "../src/runtime/runtime.js";
import { keyBytes } from "../src/source.js";

export interface Round {
  losses: number[];
  metrics: Record<string, number>;
  steps: number;
  examples: number;
}

export interface Numbers {
  publicKey: string;
  fit: { epochs: number; batch_size: number; seed: number; hyperparameters?: Record<string, number> };
  round: { seed: number; hyperparameters?: Record<string, number> };
  losses: number[];
  examples: number;
  torch?: number[];
  evaluate: Record<string, number>;
  /** What PyTorch measures with the learned weights in float, where `predict` has them in 4 bits. */
  floatLoss?: number;
  round0?: Round;
  round1?: Round;
}

export interface Fixture {
  bundle: Uint8Array;
  numbers: Numbers;
  /** Arrays by group and name, such as group("after").output. */
  group(name: string): Record<string, NdArray>;
  load(options?: Partial<LoadOptions>): Promise<RuntimeCore>;
  /** The arguments of `fit` that Python's was called with. */
  fit: {
    x: Record<string, NdArray>;
    epochs: number;
    batchSize: number;
    seed: number;
    hyperparameters: Record<string, number> | undefined;
    broadcast: Record<string, NdArray>;
  };
}

export type FixtureName = "cnn" | "mlp" | "norm" | "quantized" | "personal" | "features" | "private";

export function fixture(name: FixtureName): Fixture {
  const file = (suffix: string): URL => new URL(`fixtures/${name}${suffix}`, import.meta.url);
  const bundle = new Uint8Array(readFileSync(file(".bundle")));
  const numbers = JSON.parse(readFileSync(file(".json"), "utf8")) as Numbers;
  const arrays = readWeights(new Uint8Array(readFileSync(file(".safetensors"))));
  const group = (prefix: string): Record<string, NdArray> =>
    Object.fromEntries(
      [...arrays]
        .filter(([key]) => key.startsWith(`${prefix}/`))
        .map(([key, array]) => [key.slice(prefix.length + 1), array]),
    );
  const data = group("data");
  const x = Object.fromEntries(Object.entries(data).filter(([key]) => !key.startsWith("broadcast/")));
  const { epochs, batch_size, seed, hyperparameters } = numbers.fit;
  return {
    bundle,
    numbers,
    group,
    load: ({ trustedKeys = [numbers.publicKey], worker: _, ...options } = {}) =>
      loadCore(bundle, { ...options, trustedKeys: keyBytes(trustedKeys) }, BUILDS),
    fit: { x, epochs, batchSize: batch_size, seed, hyperparameters, broadcast: group("data/broadcast") },
  };
}

/** The examples among a fixture's fields, which is what `predict` takes. */
export function examples(runtime: RuntimeCore, x: Record<string, NdArray>): Record<string, NdArray> {
  const names = runtime.manifest.programs.predict?.inputs.filter((port) => port.role === "example") ?? [];
  return Object.fromEntries(names.map(({ name }) => [name, x[name] as NdArray]));
}

/** Each element within `rtol` of the larger magnitude, or `atol`. */
export function expectClose(found: ArrayLike<number>, expected: ArrayLike<number>, rtol = 1e-4, atol = 1e-7): void {
  expect(found.length).toBe(expected.length);
  for (let index = 0; index < expected.length; index++) {
    const [a, b] = [found[index] as number, expected[index] as number];
    if (!(Math.abs(a - b) <= atol + rtol * Math.abs(b))) {
      expect.fail(`element ${index} is ${a}, expected ${b} (rtol ${rtol}, atol ${atol})`);
    }
  }
}

export function expectArrays(
  found: Record<string, NdArray>,
  expected: Record<string, NdArray>,
  rtol = 1e-4,
  atol = 1e-6,
): void {
  expect(Object.keys(found).sort()).toEqual(Object.keys(expected).sort());
  for (const [name, array] of Object.entries(expected)) {
    expect([name, found[name]?.dtype, found[name]?.dims]).toEqual([name, array.dtype, array.dims]);
    expectClose(found[name]?.data as Float32Array, array.data as Float32Array, rtol, atol);
  }
}

/** Bytes that the Python side can make too: SHA-256 of seed/0, seed/1, ... */
export function byteSource(seed: string): Randomness {
  let block = 0;
  return (count) => {
    const parts: Uint8Array[] = [];
    for (let length = 0; length < count; length += 32) {
      parts.push(createHash("sha256").update(`${seed}/${block++}`).digest());
    }
    return new Uint8Array(Buffer.concat(parts).subarray(0, count));
  };
}
