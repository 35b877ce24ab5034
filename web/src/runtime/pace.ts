/** How fast a runtime is, by the clock: training steps, or answers where a bundle does not train. */

import { type NdArray, zeros } from "../arrays.js";
import type { Bundle } from "../bundle/reader.js";
import type { Dim, Port } from "../bundle/roles.js";
import { ArchipelError } from "../errors.js";
import { findProgram } from "./driver.js";
import { FIELD_ROLES } from "./fields.js";
import type { RuntimeCore } from "./runtime.js";

/** Rows of a batch that may have any number, and elements of another free axis. */
const ROWS = 16;
const FREE_SIZE = 32;
const REPEATS = 3;

/** Milliseconds of a training step or of an answer on two runtimes of one bundle, with made-up examples. */
export interface Paces {
  readonly what: "step" | "answer";
  readonly first: number;
  readonly second: number;
}

/** Both runtimes are as published afterwards. null where neither steps nor answers can be timed. */
export async function comparePaces(bundle: Bundle, first: RuntimeCore, second: RuntimeCore): Promise<Paces | null> {
  for (const [what, time] of [["step", timeSteps] as const, ["answer", timeAnswers] as const]) {
    try {
      return { what, first: await time(first, bundle), second: await time(second, bundle) };
    } catch (error) {
      // A program that has no default for what it reads, or that does not learn from made-up examples.
      if (!(error instanceof ArchipelError)) throw error;
    } finally {
      for (const runtime of [first, second]) {
        for (const part of ["parameters", "personal", "state"] as const) await runtime.reset(part);
      }
    }
  }
  return null;
}

async function timeSteps(runtime: RuntimeCore, bundle: Bundle): Promise<number> {
  const ports = new Map<string, Port>();
  for (const kind of ["train", "features"] as const) {
    const name = findProgram(bundle, kind);
    for (const port of name === null ? [] : bundle.program(name).inputs) ports.set(port.name, port);
  }
  const fields = [...ports.values()].filter((port) => FIELD_ROLES.has(port.role));
  const x = Object.fromEntries(fields.map((port) => [port.name, madeUp(port)]));
  const others = [...ports.values()].flatMap((port) =>
    port.role === "broadcast" ? [[port.tensor, madeUp(port)] as const] : [],
  );
  const batchSize = Object.values(x)[0]?.dims[0] ?? ROWS;
  const ends: number[] = [];
  // The first step makes what later ones use.
  await runtime.fit({
    x,
    batchSize,
    epochs: REPEATS + 1,
    shuffle: false,
    broadcast: Object.fromEntries(others),
    onStep: () => void ends.push(performance.now()),
  });
  return Math.min(...ends.slice(1).map((end, index) => end - (ends[index] as number)));
}

async function timeAnswers(runtime: RuntimeCore, bundle: Bundle): Promise<number> {
  const name = findProgram(bundle, "predict");
  const ports = name === null ? [] : bundle.program(name).inputs.filter((port) => port.role === "example");
  const x = Object.fromEntries(ports.map((port) => [port.name, madeUp(port)]));
  await runtime.predict(x);
  let shortest = Number.POSITIVE_INFINITY;
  for (let repeat = 0; repeat < REPEATS; repeat++) {
    const begun = performance.now();
    await runtime.predict(x);
    shortest = Math.min(shortest, performance.now() - begun);
  }
  return shortest;
}

function madeUp(port: Port): NdArray {
  const size = (dim: Dim, axis: number): number => (typeof dim === "number" ? dim : axis ? FREE_SIZE : ROWS);
  const array = zeros(port.dtype, port.shape.map(size));
  // Integers stay 0: they may be places in a table.
  if (array.data instanceof Float32Array) array.data.forEach((_, index, data) => (data[index] = Math.sin(index)));
  return array;
}
