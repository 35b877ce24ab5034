/** Updates as they are encoded and checked: Python's vectors, and the rules of plans. */

import { readFileSync } from "node:fs";

import { describe, expect, test } from "vitest";

import type { NdArray } from "../src/arrays.js";
import type { PrivacyPolicy } from "../src/bundle/manifest.js";
import type { Update } from "../src/bundle/roles.js";
import { hex } from "../src/bundle/digests.js";
import { BoundError, PolicyError } from "../src/device/errors.js";
import type { RoundPlan } from "../src/device/messages/rounds.js";
import { checkPlan } from "../src/device/policy.js";
import { epsilonOf } from "../src/device/privacy.js";
import { colludersOf } from "../src/device/thresholds.js";
import { Layout, roundToEven } from "../src/device/updates/layout.js";
import { packBits } from "../src/device/updates/packing.js";

type Json = any;

const FIXED: Json = JSON.parse(
  readFileSync(new URL("../../vectors/protocol/fixed_point.json", import.meta.url), "utf8"),
);
const DEFAULTS = { role: "update", clip: null, lowest: 0, noise: 0, mean: "", carries: null } as const;
const layout = new Layout(FIXED.updates.map((port: Json): Update => ({ ...DEFAULTS, ...port })));

/** Arrays of float64 from nested lists, as NumPy reads them. */
function arrays(values: Record<string, Json>): Record<string, NdArray> {
  const dims = (value: Json): number[] => (Array.isArray(value) ? [value.length, ...dims(value[0])] : []);
  return Object.fromEntries(
    Object.entries(values).map(([name, value]) => {
      const data = Float64Array.from([value].flat(Infinity) as (number | string)[], Number);
      return [name, { dtype: "float64", dims: dims(value), data }];
    }),
  );
}

describe("fixed point", () => {
  test("what Python makes of the same arrays", () => {
    const encoded = layout.encode(arrays(FIXED.arrays), 24, 200);
    expect([...encoded]).toEqual(FIXED.encoded);
    expect(hex(packBits(encoded, 24))).toBe(FIXED.packed);
    for (const [cohort, bits] of Object.entries(FIXED.modulus_bits as Record<string, number>)) {
      expect([8, 16, 24, 32].find((each) => layout.fits(each, Number(cohort)))).toBe(bits);
    }
  });

  test.each(FIXED.encode_failures as Json[])("$name", ({ arrays: given, modulus_bits, max_cohort, error }) => {
    const work = (): unknown => layout.encode(arrays(given), modulus_bits, max_cohort);
    expect(work).toThrow(expect.objectContaining({ name: error }));
  });

  test("halves go to the even neighbour", () => {
    expect([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 2.4999, -2.6].map(roundToEven)).toEqual([-2, -2, 0, 0, 2, 2, 2, -3]);
  });

  test("bits that are left over", () => {
    // 21 bits each: 0b101 and all ones, the low ones first.
    expect([...packBits(Uint32Array.of(5, 2 ** 21 - 1), 21)]).toEqual([5, 0, 224, 255, 255, 3]);
    expect([...packBits(Uint32Array.of(2 ** 32 - 1, 1), 32)]).toEqual([255, 255, 255, 255, 1, 0, 0, 0]);
  });

  test("an update beyond its clip is the program's fault", () => {
    const clipped = new Layout([{ ...DEFAULTS, name: "dw", tensor: "w", dtype: "float32", shape: [2], kind: "delta",
      weighting: "uniform", range: 1, bits: 8, clip: 1 }]);
    const update = (value: number): Record<string, NdArray> => ({
      dw: { dtype: "float32", dims: [2], data: Float32Array.of(value, 0) },
    });
    expect([...clipped.encode(update(1), 16, 2)]).toEqual([127, 0]);
    expect(() => clipped.encode(update(1.01), 16, 2)).toThrow(BoundError);
  });
});

describe("plans", () => {
  const policy: PrivacyPolicy = {
    modes: ["secure"], min_cohort: 4, threshold: 0.56, max_clip: 2, max_bits: 16, colluders: 0.2, min_contributors: 20,
    queries: 30, query_days: 30, max_value: 1e6, max_server_lr: 1, weighting: "examples",
    protocols: ["complete"], dropouts: 0.2, server: "malicious", noise_multiplier: 0,
    aggregators: null,
  };
  const plan = {
    round_id: "0".repeat(32), privacy: "secure", kind: "training", min_cohort: 9, max_cohort: 25, threshold: 16,
    modulus_bits: 32, colluders: 5, min_contributors: 0, count_adoption: false, distributions: {}, hyperparameters: {},
    protocol: "complete", neighbours: 0, partners: 0, levels: 0, site: 1, origin: null,
  } as unknown as RoundPlan;
  const updates: Update[] = [{ ...DEFAULTS, name: "dw", tensor: "w", dtype: "float32", shape: [2], kind: "delta",
    weighting: "examples", range: 1, bits: 8, clip: 1 }];

  const OVER: Partial<RoundPlan> = { protocol: "neighbours", neighbours: 20, threshold: 14, partners: 20 };
  const BOTH: Partial<PrivacyPolicy> = { protocols: ["complete", "neighbours"] };

  test("one within the policy", () => checkPlan(plan, policy, new Layout(updates)));

  test("one over neighbours within the policy, which does not state a threshold for it", () =>
    checkPlan({ ...plan, ...OVER }, { ...policy, ...BOTH, threshold: 1 }, new Layout(updates)));

  test.each<[string, Partial<RoundPlan>, Partial<PrivacyPolicy>, Partial<Update>]>([
    ["mode plain", { privacy: "plain" }, {}, {}],
    ["colluders 4", { colluders: 4 }, {}, {}],
    ["min_cohort 8", { min_cohort: 8 }, {}, {}],
    ["min_contributors 5", { min_contributors: 5 }, {}, {}],
    ["max_cohort 25 is below", { threshold: 26 }, {}, {}],
    ["below the policy's ratio 0.56", { threshold: 13, max_cohort: 24, colluders: 4 }, {}, {}],
    ["more than half of max_cohort", { threshold: 15 }, { threshold: 0.5 }, {}],
    ["protocol complete is not among the allowed neighbours", {}, { protocols: ["neighbours"] }, {}],
    ["protocol neighbours is not among the allowed complete", OVER, {}, {}],
    ["threshold 13 of 20 neighbours in a cohort of 25 is below 14", { ...OVER, threshold: 13 }, BOTH, {}],
    ["19 partners for masks", { ...OVER, partners: 19 }, BOTH, {}],
    ["the partners exceed the neighbours", { ...OVER, partners: 21 }, BOTH, {}],
    ["for secure trainings", { ...OVER, kind: "evaluation" }, BOTH, {}],
    ["for secure trainings", { ...OVER, privacy: "plain", colluders: 0 }, { ...BOTH, modes: ["plain"] }, {}],
    ["in a round over the complete graph", { neighbours: 20 }, {}, {}],
    ["add noise to their updates themselves", { noise: { deviation: 9, steps: 256 } }, {}, {}],
    ["add noise to their updates themselves", {}, { noise_multiplier: 0.5 }, {}],
    ["can overflow", { modulus_bits: 8 }, {}, {}],
    ["max_cohort 25 is below min_cohort 26", { min_cohort: 26 }, {}, {}],
    ["adoption", { count_adoption: true }, {}, {}],
    ["distributions", { distributions: { loss: {} } as never }, {}, {}],
    ["has 17 bits", {}, {}, { bits: 17 }],
    ["is clipped to 3", {}, {}, { clip: 3 }],
    ["is not clipped", {}, {}, { clip: null }],
    ["wants every device to weigh 1", {}, { weighting: "uniform" }, {}],
    ["wants every device to weigh 1", {}, { weighting: "uniform" }, { kind: "weight", weighting: "uniform" }],
    ["elements of each device's own choice", {}, {}, { carries: { method: "largest", parameters: ["w"], most: 1 } }],
    ["max_value", {}, { max_value: 1 }, { kind: "value", clip: null }],
  ])("refused: %s", (words, changed, policies, port) => {
    const given = new Layout(updates.map((each) => ({ ...each, ...port })));
    const work = (): void => checkPlan({ ...plan, ...changed }, { ...policy, ...policies }, given);
    expect(work).toThrow(PolicyError);
    expect(work).toThrow(words);
  });

  test("a ratio is meant as people wrote it", () => {
    // 0.56 * 25 in floating point is above 14.
    const alone = { ...plan, threshold: 14, max_cohort: 25, colluders: 0, min_cohort: 4 };
    checkPlan(alone, { ...policy, colluders: 0 }, new Layout(updates));
  });

  test.each([[1 / 3, 12, 4], [1 / 3, 11, 3], [0.2, 25, 5], [0.1, 10, 1], [0, 100, 0], [0.999999, 4096, 4095],
    [0.1234567, 4096, 505], [0.7654321, 999, 764]])(
    "%f of %i devices",
    (share, cohort, expected) => expect(colludersOf(share, cohort)).toBe(expected),
  );
});

// What archipel.client.memory.privacy.epsilon gives.
const EPSILONS = [[0, 0], [0.01, 0.6216926546], [0.5, 5.221543425], [8, 27.81197425]] as const;
test.each(EPSILONS)("epsilon of rho %f", (rho, expected) => {
  expect(epsilonOf(rho)).toBeCloseTo(expected, 6);
});
