/**
 * Whether a delegate computes what the model is: the bundle's own examples and expected outputs, or, in a bundle that
 * brings none, what WebAssembly answers to an example of pseudo-random numbers.
 */

import type { Runtime } from "../api.js";
import { type NdArray, numberAt, sameDims, sizeOf, zeros } from "../arrays.js";
import type { Bundle } from "../bundle/reader.js";
import type { Dim, Port, Program } from "../bundle/roles.js";
import { readWeights } from "../bundle/weights.js";
import { ArchipelError, SelfTestError } from "../errors.js";
import { findProgram } from "./driver.js";

const MAX_SELF_TEST_BYTES = 64 << 20;
/** Of the largest element of an output, for what two delegates may differ by. */
const TOLERANCE = 1e-3;
/** For a free axis other than the batch. */
const FREE_SIZE = 32;

type Outputs = Readonly<Record<string, NdArray>>;

/** The error that speaks against using `runtime`, null if there is none. `reference` makes one on WebAssembly. */
export async function selfTest(
  runtime: Runtime,
  bundle: Bundle,
  reference: () => Runtime,
): Promise<ArchipelError | null> {
  const name = findProgram(bundle, "predict");
  if (name === null) return null;
  const test = bundle.manifest.self_test;
  try {
    if (test !== null) {
      const tensors = readWeights(bundle.file(test.file), MAX_SELF_TEST_BYTES);
      const outputs = await runtime.predict(group(tensors, "example/"));
      compare(outputs, group(tensors, "output/"), test.rtol, () => test.atol);
      return null;
    }
    const examples = someExamples(bundle.program(name));
    const other = reference();
    try {
      const expected = await other.predict(examples);
      compare(await runtime.predict(examples), expected, 0, (array) => TOLERANCE * largest(array));
    } finally {
      other.close();
    }
    return null;
  } catch (error) {
    if (error instanceof ArchipelError) return error;
    throw error;
  }
}

function compare(found: Outputs, expected: Outputs, rtol: number, atol: (array: NdArray) => number): void {
  for (const [output, wanted] of Object.entries(expected)) {
    const got = found[output];
    if (got === undefined || got.dtype !== wanted.dtype || !sameDims(got.dims, wanted.dims)) {
      throw new SelfTestError(`self-test: output '${output}' is missing, or is not ${wanted.dtype}[${wanted.dims}]`);
    }
    const allowed = atol(wanted);
    for (let index = 0; index < wanted.data.length; index++) {
      const [value, right] = [numberAt(got, index), numberAt(wanted, index)];
      if (!(Math.abs(value - right) <= allowed + rtol * Math.abs(right))) {
        throw new SelfTestError(
          `self-test: output '${output}' is ${value} at element ${index}, expected ${right} ` +
            `(atol ${allowed}, rtol ${rtol})`,
        );
      }
    }
  }
}

/** One example for a `predict` program, of pseudo-random numbers; integers are 0. */
export function someExamples(program: Program): Record<string, NdArray> {
  const ports = program.inputs.filter((port) => port.role === "example");
  return Object.fromEntries(ports.map((port) => [port.name, example(port)]));
}

function example(port: Port): NdArray {
  const array = zeros(port.dtype, port.shape.map(smallest));
  const { data } = array;
  // Integers stay 0: they may be places in a table.
  if (data instanceof Float32Array || data instanceof Float64Array) {
    for (let index = 0; index < sizeOf(array.dims); index++) data[index] = Math.sin(12.9898 * index) * 1.5;
  }
  return array;
}

function group(tensors: ReadonlyMap<string, NdArray>, prefix: string): Record<string, NdArray> {
  return Object.fromEntries(
    [...tensors].filter(([key]) => key.startsWith(prefix)).map(([key, array]) => [key.slice(prefix.length), array]),
  );
}

function largest(array: NdArray): number {
  let most = 0;
  for (let index = 0; index < array.data.length; index++) most = Math.max(most, Math.abs(numberAt(array, index)));
  return most;
}

function smallest(dim: Dim, axis: number): number {
  return typeof dim === "number" ? dim : axis ? FREE_SIZE : 1;
}
