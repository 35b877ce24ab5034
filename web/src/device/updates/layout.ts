/** From update arrays to the one vector of integers that is masked and summed (archipel/protocol/vector.py). */

import { isFinite, type NdArray, numberAt, sameDims } from "../../arrays.js";
import { CHANGES, type Update } from "../../bundle/roles.js";
import { ProtocolError } from "../errors.js";
import { type Arrays, checkUpdate, clampLimits, entries, largest, step } from "./bounds.js";

/** Where each update output lies in the vector, in the outputs' order. */
export class Layout {
  constructor(readonly updates: readonly Update[]) {
    if (!updates.length) throw new ProtocolError("a program without update outputs has nothing to upload");
    if (updates.filter((port) => port.kind === "weight").length > 1) {
      throw new ProtocolError("a program may upload one weight, this one uploads several");
    }
  }

  /** Number of entries of the vector. */
  get length(): number {
    return this.updates.reduce((sum, port) => sum + entries(port), 0);
  }

  /** Whether sums of `cohort` devices cannot overflow modulo 2^bits. */
  fits(bits: number, cohort: number): boolean {
    // Sums are from -cohort M to cohort M, and each sign has half of the residues.
    return this.updates.every((port) => cohort * largest(port) < 2 ** (bits - 1));
  }

  /**
   * Fixed point of one device's update, before masking: every entry below 2^b. `arrays` are floating point, by output
   * name. Raises ProtocolError for arrays that are missing, unknown, misshapen or not finite, BoundError beyond a
   * bound.
   */
  encode(arrays: Arrays, modulusBits: number, maxCohort: number): Uint32Array {
    if (!(modulusBits >= 1 && modulusBits <= 32) || !this.fits(modulusBits, maxCohort)) {
      throw new ProtocolError(`a modulus of ${modulusBits} bits cannot hold the sum of ${maxCohort} devices`);
    }
    this.check(arrays);
    const limits = clampLimits(this.updates, arrays);
    const vector = new Uint32Array(this.length);
    const mask = modulusBits === 32 ? 0xffffffff : 2 ** modulusBits - 1;
    let at = 0;
    for (const port of this.updates) {
      const array = arrays[port.name] as NdArray;
      const [most, unit, limit] = [largest(port), step(port), limits.get(port.name) as number];
      for (let index = 0; index < array.data.length; index++) {
        let value = numberAt(array, index);
        // `limit` is below the range where an element may be at most the device's weight times the range.
        if (limit < port.range) value = Math.min(Math.max(value, -limit), limit);
        // Clamped after rounding: `fits` counts on at most M from each device, or the sum could overflow.
        const steps = Math.min(Math.max(roundToEven(value / unit), -most), most);
        // A negative number becomes its residue.
        vector[at++] = (steps >>> 0) & mask;
      }
    }
    return vector;
  }

  /** The arrays, with the changes times (1 + staleness)^-exponent (FedBuff: Nguyen et al. 2022). */
  discount(arrays: Arrays, staleness: number, exponent: number): Arrays {
    const scale = Math.fround((1 + staleness) ** -exponent);
    // Values and the weight stay: a smaller weight would undo the discount when the sum is divided by the weights.
    const changes = new Set(this.updates.filter((port) => CHANGES.has(port.kind)).map((port) => port.name));
    const scaled = ([name, array]: [string, NdArray]): [string, NdArray] => {
      if (!changes.has(name)) return [name, array];
      const data = Float32Array.from(array.data as Float32Array, (value) => value * scale);
      return [name, { ...array, data }];
    };
    return Object.fromEntries(Object.entries(arrays).map(scaled));
  }

  private check(arrays: Arrays): void {
    const known = new Set(this.updates.map((port) => port.name));
    const unknown = Object.keys(arrays).filter((name) => !known.has(name));
    if (unknown.length) throw new ProtocolError(`update: ${unknown.join(", ")} are not update outputs of the program`);
    for (const port of this.updates) {
      const array = arrays[port.name];
      const here = `update '${port.name}'`;
      if (array === undefined) {
        throw new ProtocolError(`${here}: missing; an update has every update output of the program`);
      }
      if (!sameDims(array.dims, port.shape.map(Number)) || !array.dtype.startsWith("float")) {
        throw new ProtocolError(
          `${here}: expected floating point [${port.shape}], got ${array.dtype}[${array.dims}]`,
        );
      }
      if (!isFinite(array)) {
        throw new ProtocolError(`${here}: has entries that are not finite; the local round diverged`);
      }
    }
    checkUpdate(this.updates, arrays);
  }
}

/** The nearest integer; of two as near the even one, as NumPy rounds. */
export function roundToEven(value: number): number {
  const below = Math.floor(value);
  const rest = value - below;
  if (rest !== 0.5) return rest < 0.5 ? below : below + 1;
  return below % 2 === 0 ? below : below + 1;
}
