/**
 * Checkpoints of a fit: everything that an uninterrupted run would have at the same step.
 *
 * Safetensors bytes: the tensors that have moved (`parameter/NAME`, `personal/NAME`, `state/NAME`), what was measured so
 * far (`metric/NAME`, `weight/NAME`, float64, one element a step), which examples were used (`used`), and a JSON header
 * (`header`). The data order and everything random follow from seed and step number, so they need no place.
 */

import { bytesOf, type NdArray } from "../arrays.js";
import {
  bool,
  DecodeError,
  dictionary,
  float,
  integer,
  list,
  nullable,
  required,
  struct,
  text,
} from "../bundle/decoders.js";
import { JsonSyntaxError, parseJson } from "../bundle/json.js";
import type { Bundle } from "../bundle/reader.js";
import { sha256 } from "../bundle/digests.js";
import { readWeights, writeWeights } from "../bundle/weights.js";
import { ArchipelError, CheckpointError } from "../errors.js";
import { type Groups, joinNames } from "../runtime/device_state.js";
import type { Training } from "../runtime/driver.js";
import type { Values } from "../runtime/values.js";
import { readEntry, removeEntry, writeEntry } from "./database.js";

const FORMAT = 1;
const FINGERPRINT = /^[0-9a-f]{64}$/;

interface Header {
  readonly format: number;
  readonly fingerprint: string;
  readonly phase: number;
  readonly batches: number;
  readonly steps: number;
  readonly complete: boolean;
  readonly stopped: boolean;
  /** null stands for NaN, which JSON does not have. */
  readonly validation: readonly Readonly<Record<string, number | null>>[];
}

export interface Restored {
  readonly complete: boolean;
  readonly validation: Record<string, number>[];
}

/** One entry that a fit writes and, after an interruption, goes on from. */
export class Checkpoint {
  constructor(
    readonly name: string,
    private readonly fingerprint: string,
  ) {}

  /** Replace the entry, all at once. Raises CheckpointError. */
  async write(
    values: Values,
    training: Training,
    validation: readonly Readonly<Record<string, number>>[],
    complete: boolean,
  ): Promise<void> {
    const header: Header = {
      format: FORMAT,
      fingerprint: this.fingerprint,
      phase: training.phase,
      batches: training.batches,
      steps: values.steps,
      complete,
      stopped: training.stopped,
      validation,
    };
    const tensors = values.export();
    for (const [name, list] of training.metrics.values) tensors.set(`metric/${name}`, column(list));
    for (const [name, list] of training.metrics.weights) tensors.set(`weight/${name}`, column(list));
    tensors.set("used", { dtype: "bool", dims: [training.used.length], data: training.used });
    const json = new TextEncoder().encode(JSON.stringify(header));
    tensors.set("header", { dtype: "uint8", dims: [json.length], data: json });
    try {
      await writeEntry("checkpoints", this.name, writeWeights(tensors));
    } catch (error) {
      if (!(error instanceof ArchipelError)) throw error;
      throw new CheckpointError(`checkpoint ${this.name} cannot be written: ${error.message}`);
    }
  }

  /**
   * Bring `values` and `training` to where the entry's fit stands.
   *
   * null where there is no entry, or only that of another fit that is complete. Raises CheckpointError for a damaged
   * entry and for one of another fit that is not complete, as going on here would lose it.
   */
  async read(values: Values, training: Training): Promise<Restored | null> {
    try {
      const data = await readEntry("checkpoints", this.name);
      if (data === null) return null;
      const tensors = readWeights(data);
      const header = headerOf(tensors);
      if (header.fingerprint !== this.fingerprint) {
        if (header.complete) return null;
        throw new CheckpointError(
          "it is of another fit that is not complete (other data, arguments, bundle or start); run that one again to " +
            "finish it, or choose another name",
        );
      }
      const { used } = training;
      const examples = tensors.get("used");
      if (examples?.dtype !== "bool" || examples.data.length !== used.length) {
        throw new CheckpointError(`'used' is missing or is not of ${used.length} examples`);
      }
      used.set(examples.data as Uint8Array);
      const moved = new Map<string, NdArray>();
      for (const [key, array] of tensors) {
        if (key === "header" || key === "used") continue;
        const [group = "", name = ""] = split(key);
        if (group === "metric") training.metrics.values.set(name, listOf(key, array, header.steps));
        else if (group === "weight") training.metrics.weights.set(name, listOf(key, array, header.steps));
        else moved.set(key, array);
      }
      values.restore(moved, header.steps);
      training.phase = header.phase;
      training.batches = header.batches;
      training.stopped = header.stopped;
      const validation = header.validation.map((epoch) =>
        Object.fromEntries(Object.entries(epoch).map(([name, value]) => [name, value ?? Number.NaN])),
      );
      return { complete: header.complete, validation };
    } catch (error) {
      if (!(error instanceof ArchipelError)) throw error;
      throw new CheckpointError(`checkpoint ${this.name}: cannot go on from it: ${error.message}`);
    }
  }

  remove(): Promise<void> {
    return removeEntry("checkpoints", this.name);
  }
}

/** Hex SHA-256 over everything that decides a fit's result. */
export async function fingerprint(bundle: Bundle, options: object, groups: Groups): Promise<string> {
  const arrays = await Promise.all(
    Array.from(joinNames(groups), async ([key, array]) => [key, array.dtype, array.dims, await sha256(bytesOf(array))]),
  );
  const what = JSON.stringify([bundle.digest, options, arrays]);
  return sha256(new TextEncoder().encode(what));
}

const headerDecoder = struct<Header>({
  format: required(integer),
  fingerprint: required(text),
  phase: required(integer),
  batches: required(integer),
  steps: required(integer),
  complete: required(bool),
  stopped: required(bool),
  validation: required(list(dictionary(nullable(float)))),
});

function headerOf(tensors: ReadonlyMap<string, NdArray>): Header {
  const json = tensors.get("header");
  if (json === undefined) throw new CheckpointError("its header is missing");
  let header: Header;
  try {
    header = headerDecoder(parseJson(bytesOf(json)), "header").value;
  } catch (error) {
    if (error instanceof DecodeError || error instanceof JsonSyntaxError) throw new CheckpointError(error.message);
    throw error;
  }
  const { format, phase, batches, steps } = header;
  if (format !== FORMAT) throw new CheckpointError(`format ${format}, expected ${FORMAT}`);
  if (!FINGERPRINT.test(header.fingerprint) || Math.min(phase, batches, steps) < 0) {
    throw new CheckpointError("its header holds impossible values");
  }
  return header;
}

function split(key: string): [group: string, name: string] {
  const at = key.indexOf("/");
  return [key.slice(0, Math.max(0, at)), key.slice(at + 1)];
}

function column(list: readonly number[]): NdArray {
  return { dtype: "float64", dims: [list.length], data: Float64Array.from(list) };
}

function listOf(key: string, array: NdArray, steps: number): number[] {
  if (array.dtype !== "float64" || array.data.length !== steps) {
    throw new CheckpointError(`${key} is ${array.dtype}[${array.dims}], expected float64[${steps}]`);
  }
  return Array.from(array.data as Float64Array);
}
