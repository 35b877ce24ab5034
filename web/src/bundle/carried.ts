/** The rules of a manifest about update entries that hold the changes of parameters in another form. */

import { ManifestError } from "../errors.js";
import type { TensorSpec } from "./manifest.js";
import type { Largest, Program, Rotation } from "./roles.js";

const UPDATE_SEED = "update_seed";
const MOST_SEED = 2 ** 24 - 1;
const MOST_BLOCK = 2 ** 16;

export function validateCarried(where: string, program: Program, parameters: ReadonlyMap<string, TensorSpec>): void {
  const updates = program.outputs.filter((port) => port.role === "update");
  const taken = new Set(updates.filter((port) => port.carries === null).map((port) => port.tensor));
  for (const port of updates) {
    if (port.carries === null) continue;
    const here = `${where}: update ${JSON.stringify(port.name)}`;
    if (program.kind !== "finish" || port.kind !== "delta" || port.clip === null || port.noise) {
      throw new ManifestError(`${here}: only a clipped delta of finish without noise carries the changes of others`);
    }
    if (parameters.has(port.tensor)) {
      throw new ManifestError(`${here}: its tensor is a parameter, and it carries others' changes`);
    }
    let size = 0;
    for (const name of port.carries.parameters) {
      const spec = parameters.get(name);
      if (spec === undefined || spec.dtype !== "float32") {
        throw new ManifestError(`${here}: carries ${JSON.stringify(name)}, which is not a float32 parameter`);
      }
      if (taken.has(name)) {
        throw new ManifestError(`${here}: the change of ${JSON.stringify(name)} is uploaded twice`);
      }
      taken.add(name);
      size += spec.shape.reduce<number>((product, dim) => product * Number(dim), 1);
    }
    const shape = shapeOf(here, port.carries, size);
    if (size === 0 || JSON.stringify(port.shape) !== JSON.stringify(shape)) {
      throw new ManifestError(`${here}: ${size} elements have the shape [${shape}] there, not [${port.shape}]`);
    }
    if (port.carries.method !== "rotation") continue;
    const seed = program.inputs.find((input) => input.role === "hyperparameter" && input.name === UPDATE_SEED);
    if (seed?.role !== "hyperparameter" || seed.minimum !== 0 || seed.maximum !== MOST_SEED) {
      throw new ManifestError(`${here}: needs the hyperparameter "${UPDATE_SEED}", from 0 to ${MOST_SEED}`);
    }
  }
}

function shapeOf(here: string, carries: Rotation | Largest, size: number): number[] {
  if (carries.method === "largest") {
    if (!(carries.most >= 1 && carries.most <= size)) {
      throw new ManifestError(`${here}: most must be from 1 to ${size}, is ${carries.most}`);
    }
    return [size];
  }
  const { block, taken } = carries;
  if (!(block >= 1 && block <= MOST_BLOCK && Number.isInteger(Math.log2(block)))) {
    throw new ManifestError(`${here}: block must be a power of two up to ${MOST_BLOCK}, is ${block}`);
  }
  const rows = Math.ceil(size / block);
  if (!(taken >= 0 && taken < Math.max(rows * block, 1))) {
    throw new ManifestError(`${here}: takes ${taken} of ${rows * block} elements`);
  }
  return taken ? [taken] : [rows, block];
}
