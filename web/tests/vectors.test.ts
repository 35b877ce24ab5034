/** What the Python package computes too, number for number: vectors/ holds its results. */

import { createHash } from "node:crypto";
import { readFileSync } from "node:fs";

import { describe, expect, test } from "vitest";

import { halfBits, halfValue } from "../src/arrays.js";
import { float, floatText, text } from "../src/bundle/decoders.js";
import { parseJson } from "../src/bundle/json.js";
import { exactSum } from "../src/runtime/exact_sum.js";
import { DiscreteGaussian } from "../src/runtime/noise.js";
import { batches, grouped, permutation } from "../src/runtime/shuffle.js";
import { byteSource } from "./fixture.js";

function vectors<T>(name: string): T {
  return JSON.parse(readFileSync(new URL(`vectors/${name}.json`, import.meta.url), "utf8")) as T;
}

interface Plan {
  count: number;
  batch_size: number;
  epochs: number | null;
  steps: number | null;
  shuffle: boolean;
  whole: boolean;
  skip: number;
}

describe("data order", () => {
  const { permutations, batches: plans } = vectors<{
    permutations: { count: number; seed: number; phase: number; epoch: number; order?: number[]; sha256?: string }[];
    batches: { plan: Plan; batches: [epoch: number, indices: number[], last: boolean][] }[];
  }>("shuffle");

  test.each(permutations)("$count examples, seed $seed, phase $phase, epoch $epoch", (each) => {
    const order = permutation(each.count, each.seed, each.phase, each.epoch);
    if (each.order !== undefined) expect([...order]).toEqual(each.order);
    else expect(createHash("sha256").update(order).digest("hex")).toBe(each.sha256);
  });

  test.each(plans)("batches of $plan", ({ plan, batches: expected }) => {
    const made = [...batches({ ...plan, batchSize: plan.batch_size, seed: 9, phase: 1 })];
    expect(made.map((batch) => [batch.epoch, [...batch.indices], batch.lastOfEpoch])).toEqual(expected);
  });

  test("groups stay within a pass and are of whole batches", () => {
    const plan = { count: 10, batchSize: 2, epochs: 2, steps: null, shuffle: false, seed: 0, phase: 0, skip: 0 };
    const sizes = (count: number): number[] =>
      [...grouped(batches({ ...plan, count, whole: false }), 3, 2)].map((group) => group.length);
    expect(sizes(12)).toEqual([3, 3, 3, 3]);
    expect(sizes(10)).toEqual([3, 1, 1, 3, 1, 1]);
    expect(sizes(11)).toEqual([3, 1, 1, 1, 3, 1, 1, 1]);
  });
});

describe("discrete Gaussian", () => {
  const cases = vectors<{ sigma: number; source: string; samples: string[] }[]>("noise");

  test.each(cases)("sigma $sigma", ({ sigma, source, samples }) => {
    expect(new DiscreteGaussian(sigma, byteSource(source)).sample(samples.length).map(String)).toEqual(samples);
  });

  test("the browser's generator is asked by default, in bytes that differ", () => {
    const [first, second] = [1, 2].map(() => new DiscreteGaussian(1e6).sample(8));
    expect(first).not.toEqual(second);
  });

  test.each([0, -1, Number.NaN, Number.POSITIVE_INFINITY])("sigma %d is refused", (sigma) => {
    expect(() => new DiscreteGaussian(sigma)).toThrow(RangeError);
  });
});

describe("canonical JSON", () => {
  const { numbers, texts } = vectors<{
    numbers: { bits: string; text: string }[];
    texts: { json: string; canonical: string }[];
  }>("canonical");

  test("numbers", () => {
    for (const { bits, text: expected } of numbers) {
      const value = Buffer.from(bits, "hex").readDoubleBE();
      expect(floatText(value)).toBe(expected);
      expect(float(parseJson(Buffer.from(expected)), "").value).toBe(value);
    }
  });

  test("texts", () => {
    for (const { json, canonical } of texts) expect(text(parseJson(Buffer.from(json)), "").text).toBe(canonical);
  });
});

test("sums are rounded once", () => {
  const { sums } = vectors<{ sums: { values: number[]; sum: number }[] }>("arithmetic");
  for (const { values, sum } of sums) expect(exactSum(values)).toBe(sum);
});

test("float16 is rounded to nearest even", () => {
  const { halves } = vectors<{ halves: [float32: number, float16: number][] }>("arithmetic");
  const scratch = new DataView(new ArrayBuffer(4));
  for (const [from, expected] of halves) {
    scratch.setUint32(0, from);
    expect(halfBits(scratch.getFloat32(0))).toBe(expected);
  }
  for (let bits = 0; bits < 0x10000; bits += 7) {
    const value = halfValue(bits);
    if (!Number.isNaN(value)) expect(halfBits(value)).toBe(bits);
  }
});
