/**
 * What a frozen backbone makes of each example, computed once and kept.
 *
 * A `features` program reads examples and nothing that training moves, so its result for an example holds for the whole
 * fit. Rows are computed with the first batch that needs them; those of the first examples are kept in memory as far as
 * the budget goes, the others are computed anew for every batch.
 */

import { type NdArray, sameDims, type TypedArray, zeros } from "../arrays.js";
import type { Bundle } from "../bundle/reader.js";
import type { Port, Program } from "../bundle/roles.js";
import { ITEM_BYTES } from "../bundle/validation.js";
import { RuntimeProgramError } from "../errors.js";
import { type Fields, fixedRows, type Source } from "./fields.js";
import { type Session, type Sessions, toArray } from "./sessions.js";
import { fixedShape } from "./values.js";

/** Bytes of features kept where the runtime has no memory limit. */
export const DEFAULT_FEATURE_BUDGET = 256 << 20;

/** The name of the features program if one of `programs` reads features, else null. */
export function findFeatures(bundle: Bundle, programs: readonly Program[]): string | null {
  if (!programs.some((program) => program.inputs.some((port) => port.role === "feature"))) return null;
  // The manifest's validation holds that there is one, and that it makes what is read.
  return Object.entries(bundle.manifest.programs).find(([, program]) => program.kind === "features")?.[0] ?? null;
}

/** Adds the features of `fields` to its sources. `budget` is in bytes; 0 keeps nothing. */
export async function addFeatures(
  sessions: Sessions,
  bundle: Bundle,
  name: string,
  fields: Fields,
  budget: number,
): Promise<void> {
  const cache = new FeatureCache(await sessions.get(name), bundle.program(name), fields, budget);
  cache.ports.forEach((port, index) => fields.sources.set(port.name, cache.source(index)));
}

class FeatureCache {
  readonly ports: readonly Port[];
  private readonly fixed: number | null;
  private readonly rests: readonly (readonly number[])[];
  private readonly kept: readonly NdArray[];
  private readonly have: Uint8Array;
  private lastIndices: Uint32Array | null = null;
  private lastRows: readonly NdArray[] = [];

  constructor(
    private readonly session: Session,
    private readonly program: Program,
    private readonly fields: Fields,
    budget: number,
  ) {
    this.ports = program.outputs;
    this.fixed = fixedRows(program.inputs);
    this.rests = this.ports.map((port) => fixedShape(port, 1));
    const each = this.ports.reduce(
      (bytes, port, index) => bytes + ITEM_BYTES[port.dtype] * width(this.rests[index] ?? []),
      0,
    );
    const rows = Math.min(fields.count, Math.floor(Math.max(0, budget) / Math.max(1, each)));
    this.kept = this.ports.map((port, index) => zeros(port.dtype, [rows, ...(this.rests[index] ?? [])]));
    this.have = new Uint8Array(rows);
  }

  source(index: number): Source {
    const dims = [this.fields.count, ...(this.rests[index] ?? [])];
    return {
      dims,
      take: async (indices, out, at) => {
        const rows = await this.rows(indices);
        out.set((rows[index] as NdArray).data as never, at);
      },
    };
  }

  /** Every feature of the examples `indices`, in the order of the ports. */
  private async rows(indices: Uint32Array): Promise<readonly NdArray[]> {
    // All features of a batch are asked for one after the other.
    if (this.lastIndices === indices) return this.lastRows;
    const missing = indices.filter((index) => !this.have[index]);
    const made = missing.length ? await this.compute(missing) : [];
    const near = this.have.length;
    missing.forEach((index, row) => {
      if (index >= near) return;
      this.kept.forEach((array, port) => copyRow(made[port] as NdArray, row, array, index));
      this.have[index] = 1;
    });
    const rowOf = new Map(Array.from(missing, (index, row) => [index, row]));
    this.lastRows = this.ports.map((port, each) => {
      const array = zeros(port.dtype, [indices.length, ...(this.rests[each] ?? [])]);
      indices.forEach((index, row) => {
        const [source, from] = index < near ? [this.kept[each], index] : [made[each], rowOf.get(index)];
        copyRow(source as NdArray, from ?? 0, array, row);
      });
      return array;
    });
    this.lastIndices = indices;
    return this.lastRows;
  }

  private async compute(indices: Uint32Array): Promise<NdArray[]> {
    const step = this.fixed ?? indices.length;
    const results = this.ports.map((port, each) => zeros(port.dtype, [indices.length, ...(this.rests[each] ?? [])]));
    for (let first = 0; first < indices.length; first += step) {
      const used = indices.subarray(first, first + step);
      await this.computePart(used, step, results, first);
    }
    return results;
  }

  private async computePart(used: Uint32Array, rows: number, results: NdArray[], first: number): Promise<void> {
    const feed = Object.fromEntries(
      this.program.inputs.map((port) => {
        const source = this.fields.arrays.get(port.name) as NdArray;
        const array = zeros(port.dtype, [rows, ...source.dims.slice(1)]);
        // Filled up with the first example; those rows are dropped below.
        for (let row = 0; row < rows; row++) copyRow(source, used[row] ?? used[0] ?? 0, array, row);
        return [port.name, this.session.tensor(array)];
      }),
    );
    const outputs = await this.session.run(
      feed,
      this.ports.map((port) => port.name),
    );
    for (const [each, port] of this.ports.entries()) {
      const made = await toArray(outputs[port.name] as never);
      const expected = [rows, ...(this.rests[each] ?? [])];
      if (made.dtype !== port.dtype || !sameDims(made.dims, expected)) {
        throw new RuntimeProgramError(
          `features '${port.name}': the manifest says ${port.dtype}[${expected}], the graph made ` +
            `${made.dtype}[${made.dims}]; convert the bundle again`,
        );
      }
      const size = width(expected.slice(1));
      const result = results[each] as NdArray;
      result.data.set(made.data.subarray(0, used.length * size) as never, first * size);
    }
  }
}

function width(rest: readonly number[]): number {
  return rest.reduce((size, dim) => size * dim, 1);
}

function copyRow(source: NdArray, from: number, target: NdArray, to: number): void {
  const size = width(source.dims.slice(1));
  (target.data as TypedArray).set(source.data.subarray(from * size, (from + 1) * size) as never, to * size);
}
