/** The walk over graphs, on the graphs that the Python package's is tested on as well (graph_corpus.py). */

import { readFileSync } from "node:fs";

import { describe, expect, test } from "vitest";

import { inspectGraph } from "../src/bundle/graphs/inspection.js";
import { openBundle } from "../src/bundle/reader.js";
import { UnsafeGraphError } from "../src/errors.js";
import { keyBytes } from "../src/source.js";
import { fixture } from "./fixture.js";
import { filesOf, withFile } from "./forge.js";

const folder = new URL("graphs/", import.meta.url);
const index = JSON.parse(readFileSync(new URL("graphs.json", folder), "utf8")) as {
  weights: number;
  graphs: Record<string, string | null>;
};
const WEIGHTS = { name: "weights.safetensors", bytes: index.weights };

const read = (name: string): Uint8Array => new Uint8Array(readFileSync(new URL(`${name}.onnx`, folder)));

/** What the inspection says; null where the graph passes. */
function refusal(data: Uint8Array): string | null {
  try {
    inspectGraph("p", data, WEIGHTS);
    return null;
  } catch (error) {
    expect(error).toBeInstanceOf(UnsafeGraphError);
    return (error as Error).message;
  }
}

describe("the same graphs as in Python", () => {
  test.each(Object.entries(index.graphs))("%s", (name, error) => {
    const found = refusal(read(name));
    if (error === null) expect(found).toBeNull();
    else expect(found).toContain(error);
    if (found !== null) expect(found).toMatch(/^program 'p': /);
  });
});

test("any change of a byte is refused or passes, and ends soon", () => {
  let state = 12345;
  const next = (below: number): number => {
    state = (Math.imul(state, 1103515245) + 12345) >>> 0;
    return state % below;
  };
  const names = Object.keys(index.graphs).filter((name) => name.startsWith("good"));
  for (let turn = 0; turn < 3000; turn++) {
    const data = read(names[next(names.length)] as string);
    for (let change = 0; change <= next(3); change++) data[next(data.length)] = next(256);
    refusal(data.subarray(0, next(4) ? data.length : next(data.length)));
  }
});

test("a bundle with such a graph is not opened, whoever signed it", async () => {
  const { bundle, numbers } = fixture("mlp");
  const file = Object.keys(Object.fromEntries(filesOf(bundle))).find((name) => name.endsWith(".onnx")) as string;
  const forged = await withFile(bundle, file, read("location_outside"));
  await expect(openBundle(forged, keyBytes([numbers.publicKey]))).rejects.toThrow(UnsafeGraphError);
});
