/** How far steps may go: Python's numbers of every strategy, and the same decisions about weights. */

import { readFileSync } from "node:fs";

import { describe, expect, test } from "vitest";

import type { NdArray } from "../src/arrays.js";
import type { Manifest } from "../src/bundle/manifest.js";
import { PolicyError, ProvenanceError } from "../src/device/errors.js";
import { checkMoved, checkTensors, type Rounds, type Tensors } from "../src/device/steps/distances.js";
import { stepBound } from "../src/device/steps/step_bounds.js";

// The file's shape is that which scripts/protocol_vectors/steps.py writes.
type Json = any;
const STEPS: Json = JSON.parse(readFileSync(new URL("../../vectors/protocol/steps.json", import.meta.url), "utf8"));

/** The parts of a manifest that say how far a step may go. */
function manifestOf(strategy: string, updates: string): Manifest {
  const finish = { kind: "finish", inputs: [], outputs: STEPS.updates[updates] };
  const privacy = { max_server_lr: STEPS.max_server_lr };
  return { name: "m", strategy, parameters: STEPS.parameters, privacy, programs: { finish } } as unknown as Manifest;
}

describe("the bound of a step", () => {
  const strategies = [...new Set((STEPS.bounds as Json[]).map(({ strategy }) => strategy as string))];

  test.each(strategies)("%s", (name) => {
    for (const { strategy, updates, given, devices, bound, error } of STEPS.bounds as Json[]) {
      if (strategy !== name) continue;
      const work = (): number => stepBound(manifestOf(strategy, updates), given, devices);
      if (error) expect(work).toThrow(PolicyError);
      // Python's and the browser's logarithms and powers may differ in the last bits.
      else expect(work() / (bound ?? 1)).toBeCloseTo(bound === null ? Number.POSITIVE_INFINITY : 1, 12);
    }
  });

  test("of a strategy that nobody knows there is none", () => {
    expect(() => stepBound(manifestOf("constructor", "weighted"), {}, 3)).toThrow("does not know how far its steps go");
    expect(() => stepBound(manifestOf("ifca", "weighted"), {}, 3)).toThrow("have no ifca/weights");
    expect(() => stepBound(manifestOf("fedavg", "weighted"), { server_lr: Number.NaN }, 3)).toThrow(PolicyError);
  });
});

function tensorsOf(values: Readonly<Record<string, readonly number[]>>): Tensors {
  const arrayOf = (data: readonly number[]): NdArray => {
    return { dtype: "float32", dims: [data.length], data: Float32Array.from(data) };
  };
  return new Map(Object.entries(values).map(([name, data]) => [name, arrayOf(data)]));
}

function decides(error: string, work: () => void): void {
  if (error) expect(work).toThrow(ProvenanceError);
  else work();
}

test.each(STEPS.distances as Json[])("moved by $moved, bound $bound, $steps steps", (given) => {
  const { start, moved, bound, steps, error } = given;
  const after = tensorsOf({ w: (start as number[]).map((entry) => Math.fround(entry + moved)) });
  const manifest = manifestOf("fedavg", "weighted");
  decides(error, () => checkMoved("w", manifest, after, tensorsOf({ w: start }), bound, steps, { back: 0, on: 0 }));
});

test.each(STEPS.statistics as Json[])("statistics $after, $back rounds back and $on on", (given) => {
  const { start, after, error, ...rounds } = given;
  const [now, before] = [tensorsOf({ ...after, w: [1] }), tensorsOf({ ...start, w: [1] })];
  const manifest = manifestOf("fedavg", "statistics");
  // Whatever the bound of what gradients train: statistics have their own.
  decides(error, () => checkMoved("m", manifest, now, before, 1e9, 0, rounds as Rounds));
});

test("weights that are too large for numbers are refused", () => {
  const [huge, start] = [tensorsOf({ w: [3e38, 3e38] }), tensorsOf({ w: [0, 0] })];
  const manifest = manifestOf("fedavg", "weighted");
  expect(() => checkMoved("w", manifest, huge, start, 1e30, 1, { back: 0, on: 1 })).toThrow(ProvenanceError);
  for (const wrong of [tensorsOf({ v: [0, 0] }), tensorsOf({ w: [0] }), tensorsOf({ w: [0, Number.NaN] }), new Map()]) {
    expect(() => checkTensors("w", wrong, start)).toThrow(ProvenanceError);
  }
});
