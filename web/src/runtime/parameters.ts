/** Parameters as they come from callers and go to them. */

import { bytesOf, type NdArray } from "../arrays.js";
import type { Manifest } from "../bundle/manifest.js";
import type { Parameter } from "../bundle/roles.js";
import { RuntimeInputError } from "../errors.js";
import { type Arrays, checkArray } from "./fields.js";

/** The caller's parameters, checked and copied. Raises RuntimeInputError for one that is not the bundle's. */
export function checkedParameters(manifest: Manifest, parameters: Arrays): Map<string, NdArray> {
  const specs = new Map(manifest.parameters.map((spec) => [spec.name, spec]));
  const checked = new Map<string, NdArray>();
  for (const [name, array] of Object.entries(parameters)) {
    const spec = specs.get(name);
    if (spec === undefined) {
      throw new RuntimeInputError(
        `parameter '${name}' is not one of bundle ${manifest.name}: ${[...specs.keys()].join(", ")}`,
      );
    }
    const port: Parameter = { role: "parameter", name, tensor: name, dtype: spec.dtype, shape: spec.shape };
    checkArray("parameters", port, array);
    checked.set(name, { dtype: array.dtype, dims: [...array.dims], data: array.data.slice() });
  }
  return checked;
}

/** As `checkedParameters`, for all of them. */
export function completeParameters(manifest: Manifest, parameters: Arrays): Map<string, NdArray> {
  const missing = manifest.parameters.map(({ name }) => name).filter((name) => parameters[name] === undefined);
  if (missing.length) {
    throw new RuntimeInputError(`parameters: ${missing.join(", ")} missing; a round starts from all of them`);
  }
  return checkedParameters(manifest, parameters);
}

/** Copies, so that no caller can reach into the model. */
export function copied(arrays: ReadonlyMap<string, NdArray>): Record<string, NdArray> {
  return Object.fromEntries(
    Array.from(arrays, ([name, { dtype, dims, data }]) => [name, { dtype, dims: [...dims], data: data.slice() }]),
  );
}

export function sameBytes(first: NdArray, second: NdArray): boolean {
  if (first === second) return true;
  const [a, b] = [bytesOf(first), bytesOf(second)];
  return a.length === b.length && a.every((byte, index) => byte === b[index]);
}
