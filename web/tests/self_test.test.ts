/** A delegate is compared with the bundle's own answers, or with WebAssembly's. */

import { describe, expect, test } from "vitest";

import type { NdArray } from "../src/arrays.js";
import { openBundle } from "../src/bundle/reader.js";
import { readWeights, writeWeights } from "../src/bundle/weights.js";
import { loadCore } from "../src/core.js";
import { BUILDS } from "../src/runtime/builds.js";
import { SelfTestError, TensorLayoutError } from "../src/errors.js";
import type { Runtime } from "../src/index.js";
import { selfTest } from "../src/runtime/self_test.js";
import { keyBytes } from "../src/source.js";
import { fixture } from "./fixture.js";
import { filesOf, withFile } from "./forge.js";

const given = fixture("mlp");
const KEYS = keyBytes([given.numbers.publicKey]);

async function outcome(file: Uint8Array): Promise<Error | null> {
  const runtime = await loadCore(file, { trustedKeys: KEYS, delegate: "wasm" }, BUILDS);
  const reference = (): Runtime => {
    throw new Error("a bundle with vectors needs no reference");
  };
  return selfTest(runtime, await openBundle(file, KEYS), reference);
}

describe("a bundle with vectors", () => {
  const vectors = filesOf(given.bundle).get("self_test.safetensors") as Uint8Array;

  const changed = async (change: (tensors: Map<string, NdArray>) => void): Promise<Error | null> => {
    const tensors = readWeights(vectors.slice());
    change(tensors);
    return outcome(await withFile(given.bundle, "self_test.safetensors", writeWeights(tensors)));
  };

  test("answers as it must", async () => {
    expect(await outcome(given.bundle)).toBeNull();
  });

  test.each<[what: string, change: (tensors: Map<string, NdArray>) => void, message: RegExp]>([
    ["another value", (tensors) => void (get(tensors).data[3] = 9), /'output' is .* at element 3, expected 9/],
    ["not a number", (tensors) => void (get(tensors).data[0] = Number.NaN), /expected NaN/],
    ["other dimensions", (tensors) => void (get(tensors).dims = [16]), /is not float32\[16\]/],
    ["another output", (tensors) => void tensors.set("output/more", get(tensors)), /'more' is missing/],
    ["no example", (tensors) => void tensors.delete("example/input"), /field 'input' .* is missing/],
  ])("%s", async (_, change, message) => {
    expect((await changed(change))?.message).toMatch(message);
  });

  test("a file that is none", async () => {
    const file = await withFile(given.bundle, "self_test.safetensors", new Uint8Array(20));
    expect(await outcome(file)).toBeInstanceOf(TensorLayoutError);
  });
});

test("a bundle without vectors is compared with another runtime", async () => {
  const bare = fixture("personal");
  const runtime = await bare.load();
  const bundle = await openBundle(bare.bundle, KEYS);
  const closed: string[] = [];
  const reference = (change: (output: NdArray) => void): (() => Runtime) => {
    return () =>
      ({
        predict: async (x: Record<string, NdArray>) => {
          const outputs = await runtime.predict(x);
          for (const array of Object.values(outputs)) change(array);
          return outputs;
        },
        close: () => void closed.push("closed"),
      }) as unknown as Runtime;
  };
  expect(
    await selfTest(
      runtime,
      bundle,
      reference(() => undefined),
    ),
  ).toBeNull();
  const wrong = await selfTest(
    runtime,
    bundle,
    reference((output) => {
      (output.data as Float32Array)[0]! += 1;
    }),
  );
  expect(wrong).toBeInstanceOf(SelfTestError);
  expect(closed).toHaveLength(2);
});

function get(tensors: Map<string, NdArray>): NdArray {
  return tensors.get("output/output") as NdArray;
}
