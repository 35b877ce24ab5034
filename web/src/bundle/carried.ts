/** The rules of a manifest about update entries that hold the changes of parameters in another form. */

import { ManifestError } from "../errors.js";
import type { TensorSpec } from "./manifest.js";
import type { Largest, Program, Rotation, Update } from "./roles.js";

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
    if (port.carries.method === "low_rank") {
      validateFactors(here, port, port.carries.parameters, program, parameters);
      continue;
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

function validateFactors(
  here: string,
  port: Update,
  names: readonly string[],
  program: Program,
  parameters: ReadonlyMap<string, TensorSpec>,
): void {
  const [name = ""] = names;
  const [rows = 0, ...others] = (parameters.get(name)?.shape ?? []).map(Number);
  if (names.length !== 1 || others.length === 0) {
    throw new ManifestError(`${here}: carries the factors of one matrix, not [${names}]`);
  }
  const columns = others.reduce((product, dim) => product * dim, 1);
  const rank = port.shape.length === 2 ? Number(port.shape[1]) : 0;
  if (!(rank >= 1 && rank <= Math.min(rows, columns) && port.shape[0] === rows + columns)) {
    throw new ManifestError(`${here}: factors of a matrix [${rows}, ${columns}] have no shape [${port.shape}]`);
  }
  for (const [prefix, size] of [
    ["low_rank/left/", rows],
    ["low_rank/right/", columns],
  ] as const) {
    const basis = program.inputs.find((input) => input.role === "broadcast" && input.tensor === prefix + name);
    if (JSON.stringify(basis?.shape) !== JSON.stringify([size, rank])) {
      throw new ManifestError(`${here}: the program reads no bases of "${name}" of rank ${rank} as broadcasts`);
    }
  }
}
