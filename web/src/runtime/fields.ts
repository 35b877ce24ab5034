/** The caller's arrays, checked against the ports that will read them before anything runs. */

import { checkNdArray, type NdArray, type TypedArray } from "../arrays.js";
import type { Dim, Port, Role } from "../bundle/roles.js";
import { RuntimeInputError, RuntimeProgramError } from "../errors.js";

export type Arrays = Readonly<Record<string, NdArray>>;

export const FIELD_ROLES: ReadonlySet<Role> = new Set<Role>(["example", "label", "example_weight"]);
/** What a batch is made of: the caller's fields, and features computed of them. */
export const BATCH_ROLES: ReadonlySet<Role> = new Set<Role>([...FIELD_ROLES, "feature"]);

/** Rows by example number. `dims` are those of all of them; the first is the number of examples. */
export interface Source {
  readonly dims: readonly number[];
  /** Copy the rows `indices` into `out` from element `at` on. */
  take(indices: Uint32Array, out: TypedArray, at: number): void | Promise<void>;
}

/** Local data: sources by field name with the same number of examples. */
export class Fields {
  readonly sources: Map<string, Source>;

  constructor(
    readonly arrays: ReadonlyMap<string, NdArray>,
    readonly count: number,
  ) {
    this.sources = new Map(Array.from(arrays, ([name, array]) => [name, new ArraySource(array)]));
  }
}

class ArraySource implements Source {
  readonly dims: readonly number[];
  private readonly width: number;

  constructor(private readonly array: NdArray) {
    this.dims = array.dims;
    this.width = array.data.length / Math.max(1, array.dims[0] ?? 1);
  }

  take(indices: Uint32Array, out: TypedArray, at: number): void {
    const { width } = this;
    let to = at;
    for (const index of indices) {
      // Both have the dtype of one port, so the element types agree.
      out.set(this.array.data.subarray(index * width, (index + 1) * width) as never, to);
      to += width;
    }
  }
}

/**
 * Give the arrays their field names and check each against its port.
 *
 * `x` maps field names to arrays, or is the array of the only example field; `y` is that of the only label field. Fields
 * that no port reads are left aside. Raises RuntimeInputError.
 */
export function collect(where: string, ports: readonly Port[], x: NdArray | Arrays, y?: NdArray | null): Fields {
  const given = named(where, ports, x, y);
  const dims = new Map<string, readonly [size: number, owner: string]>();
  const arrays = new Map<string, NdArray>();
  let count: number | null = null;
  for (const port of ports) {
    const array = given.get(port.name);
    if (array === undefined) {
      if (port.role === "example_weight") continue;
      const there = [...given.keys()].sort().join(", ") || "nothing";
      throw new RuntimeInputError(`${where}: field '${port.name}' (${describe(port)}) is missing; given: ${there}`);
    }
    checkArray(where, port, array, dims, true);
    const rows = array.dims[0];
    if (rows === undefined) {
      throw new RuntimeInputError(`${where}: field '${port.name}' has no batch axis in the manifest`);
    }
    count ??= rows;
    if (rows !== count) {
      throw new RuntimeInputError(
        `${where}: field '${port.name}' has ${rows} examples, the fields before it have ${count}`,
      );
    }
    arrays.set(port.name, array);
  }
  if (!count) throw new RuntimeInputError(`${where}: no examples; give at least one`);
  return new Fields(arrays, count);
}

/**
 * Raises RuntimeInputError unless `array` has the port's dtype and shape.
 *
 * `sizes` collects those of symbolic dimensions, so that equal symbols are held to equal sizes; `freeBatch` leaves the
 * first axis alone.
 */
export function checkArray(
  where: string,
  port: Port,
  array: unknown,
  sizes?: Map<string, readonly [size: number, owner: string]>,
  freeBatch = false,
): asserts array is NdArray {
  checkNdArray(`${where}: '${port.name}' (${describe(port)})`, array);
  if (array.dtype !== port.dtype) throw wrong(where, port, array, `; convert it to ${port.dtype}`);
  if (array.dims.length !== port.shape.length) {
    const hint = freeBatch && array.dims.length === port.shape.length - 1 ? "; add the batch axis in front" : "";
    throw wrong(where, port, array, hint);
  }
  port.shape.forEach((expected: Dim, axis: number) => {
    if (freeBatch && axis === 0) return;
    const size = array.dims[axis] as number;
    if (typeof expected === "number") {
      if (size !== expected) throw wrong(where, port, array, ` (axis ${axis} differs)`);
      return;
    }
    const [before, owner] = sizes?.get(expected) ?? [size, port.name];
    if (size !== before) throw wrong(where, port, array, ` (${expected} = ${before} in '${owner}')`);
    sizes?.set(expected, [before, owner]);
  });
}

/**
 * The number of rows that a graph with these fields is made for, null if it takes any number; `axis` is the batch's.
 *
 * Raises RuntimeProgramError if two fields differ.
 */
export function fixedRows(ports: readonly Port[]): number | null {
  const sizes = new Set(ports.map((port) => port.shape[0]).filter((dim) => typeof dim === "number"));
  if (sizes.size > 1) {
    throw new RuntimeProgramError(`fields of one program have batch axes of different sizes: ${[...sizes].join(", ")}`);
  }
  return [...sizes][0] ?? null;
}

/** Such as float32[batch, 1, 28, 28]. */
export function describe(port: Port): string {
  return `${port.dtype}[${port.shape.join(", ")}]`;
}

/** Whether `x` is one array rather than arrays by name. */
export function isArray(x: NdArray | Arrays): x is NdArray {
  return ArrayBuffer.isView((x as NdArray).data) && Array.isArray((x as NdArray).dims);
}

function wrong(where: string, port: Port, array: NdArray, hint: string): RuntimeInputError {
  const got = `${array.dtype}[${array.dims.join(", ")}]`;
  return new RuntimeInputError(`${where}: '${port.name}' must be ${describe(port)}, got ${got}${hint}`);
}

function named(
  where: string,
  ports: readonly Port[],
  x: NdArray | Arrays,
  y: NdArray | null | undefined,
): Map<string, NdArray> {
  if (typeof x !== "object" || x === null) {
    throw new RuntimeInputError(`${where}: expected an array or arrays by field name as x, got ${typeof x}`);
  }
  const given = new Map<string, NdArray>(isArray(x) ? [[only(where, ports, "example", "x"), x]] : Object.entries(x));
  if (y !== undefined && y !== null) given.set(only(where, ports, "label", "y"), y);
  return given;
}

function only(where: string, ports: readonly Port[], role: Role, argument: string): string {
  const names = ports.filter((port) => port.role === role).map((port) => port.name);
  if (names.length !== 1) {
    throw new RuntimeInputError(
      `${where}: an array as ${argument} needs exactly one field of that role, the program has ` +
        `${names.join(", ") || "none"}; give a record from field name to array as x`,
    );
  }
  return names[0] as string;
}
