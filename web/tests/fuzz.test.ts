/** Mutated bundles, the same ones every time: only documented errors come out, and never another bundle. */

import { describe, expect, test } from "vitest";

import { unpack } from "../src/bundle/archive.js";
import { openBundle } from "../src/bundle/reader.js";
import { readWeights } from "../src/bundle/weights.js";
import * as errors from "../src/errors.js";
import { load } from "../src/index.js";
import { keyBytes } from "../src/source.js";
import { fixture } from "./fixture.js";
import { filesOf, signed, withFile } from "./forge.js";

const { bundle, numbers } = fixture("mlp");
const KEYS = keyBytes([numbers.publicKey]);
const FILES = filesOf(bundle);

describe("mutations", () => {
  /** Deterministic random numbers (xorshift32). */
  function random(seed: number): (below: number) => number {
    let state = seed;
    return (below) => {
      state ^= state << 13;
      state ^= state >>> 17;
      state ^= state << 5;
      return (state >>> 0) % below;
    };
  }

  function mutated(data: Uint8Array, next: (below: number) => number): Uint8Array {
    const copy = Array.from(data);
    for (let count = 1 + next(3); count > 0; count--) {
      const at = next(copy.length);
      const kind = next(4);
      if (kind === 0) copy[at] = (copy[at] as number) ^ (1 << next(8));
      else if (kind === 1) copy.splice(at, 1 + next(8));
      else if (kind === 2) copy.splice(at, 0, ...copy.slice(at, at + 1 + next(16)));
      else copy[at] = [0, 0xff, 0x22, 0x2c, 0x30, 0x5b, 0x7b, 0x7d][next(8)] as number;
    }
    return Uint8Array.from(copy);
  }

  const sameBytes = (a: Uint8Array, b: Uint8Array | undefined): boolean =>
    b !== undefined && Buffer.compare(a, b) === 0;

  test("of the zip: only documented errors, and never another bundle", async () => {
    const next = random(1);
    for (let round = 0; round < 200; round++) {
      const file = mutated(bundle, next);
      const outcome = await openBundle(file, KEYS).catch((error: unknown) => error);
      if (!(outcome instanceof errors.BundleError)) {
        // Fields that nobody reads (the time of a member) may differ; what is read may not.
        const members = unpack(file);
        expect([...members.keys()]).toEqual([...FILES.keys()]);
        for (const [name, data] of members) expect([name, sameBytes(data, FILES.get(name))]).toEqual([name, true]);
      }
    }
  });

  test("of the signed manifest: only documented errors", async () => {
    const next = random(2);
    for (let round = 0; round < 300; round++) {
      const manifest = mutated(FILES.get("manifest.json") as Uint8Array, next);
      const outcome = await openBundle(await signed(new Map([...FILES, ["manifest.json", manifest]])), KEYS).catch(
        (error: unknown) => error,
      );
      // Some are as good as the original: a name with another letter.
      if (outcome instanceof Error) expect([round, outcome]).toEqual([round, expect.any(errors.BundleError)]);
    }
  });

  test("of the weights' header and of graphs behind a signature: only documented errors", async () => {
    const next = random(3);
    const weights = FILES.get("weights.safetensors") as Uint8Array;
    for (let round = 0; round < 200; round++) {
      try {
        readWeights(mutated(weights.subarray(0, 400), next));
      } catch (error) {
        expect([round, error]).toEqual([round, expect.any(errors.TensorLayoutError)]);
      }
    }
    const x = { dtype: "float32", dims: [1, 12], data: new Float32Array(12) };
    let passed = 0;
    for (let round = 0; round < 100; round++) {
      const graph = mutated(FILES.get("predict.onnx") as Uint8Array, next);
      const file = await withFile(bundle, "predict.onnx", graph);
      const rt = await load(file, { trustedKeys: [numbers.publicKey], delegate: "wasm" }).catch((error: unknown) => {
        expect([round, error]).toEqual([round, expect.any(errors.UnsafeGraphError)]);
        return null;
      });
      if (rt === null) continue;
      passed++;
      await rt.setParameters(await rt.parameters());
      const outcome = await rt.predict(x).catch((error: unknown) => error);
      if (outcome instanceof Error) expect([round, outcome]).toEqual([round, expect.any(errors.ArchipelError)]);
      rt.close();
    }
    // Names and numbers may be others: what the walk takes has to get as far as ONNX Runtime.
    expect(passed).toBeGreaterThan(3);
  });
});
