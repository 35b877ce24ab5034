/**
 * The comparison of two versions of a model on the device's own examples: may the new one replace the running one
 * (archipel/client/versions/comparing.py)?
 */

import type { NdArray } from "../../arrays.js";
import type { Bundle } from "../../bundle/reader.js";
import type { Program } from "../../bundle/roles.js";
import { ArchipelError } from "../../errors.js";
import { findProgram } from "../../runtime/driver.js";
import { permutation } from "../../runtime/shuffle.js";
import type { Device, Examples } from "../device.js";
import { ClientError, RoundAbandonedError } from "../errors.js";
import { ACCURACY, measured, measures } from "../measures.js";
import { type Content, openContent } from "./opening.js";

const LOSS = "loss";
/** The most examples for a comparison; of more, a sample is drawn, the same for both versions. */
const MAX_EXAMPLES = 10_000;

/** The device's examples cannot be read, which says nothing about the version. */
export class ExamplesError extends ClientError {
  override name = "ExamplesError";
}

/** Whether to adopt the new version, and why. */
export interface Verdict {
  readonly adopt: boolean;
  readonly reason: string;
  /** What was measured of both versions; null if nothing was. */
  readonly measured: { readonly metric: string; readonly offered: number; readonly running: number } | null;
}

export function verdict(adopt: boolean, reason: string, found: Verdict["measured"] = null): Verdict {
  return { adopt, reason, measured: found };
}

/**
 * Evaluate both versions with the device's personal tensors on the same examples, and compare loss or accuracy.
 *
 * Raises ExamplesError, what evaluating the new version raises, and RoundAbandonedError if the device may not work any
 * more.
 */
export async function compare(device: Device, offered: Content, running: Content): Promise<Verdict> {
  const program = evaluateOf(offered.bundle);
  if (program === null) return verdict(true, "after the self-test alone: its bundle has no evaluate program");
  // The loss if both versions have it, else the accuracy if both have that, else what the new one has.
  const metrics = [LOSS, ACCURACY].filter((name) => measures(program).has(name));
  const there = evaluateOf(running.bundle);
  const shared = metrics.filter((name) => there !== null && measures(there).has(name));
  const metric = [...shared, ...metrics][0];
  if (metric === undefined) {
    return verdict(true, `after the self-test alone: it measures neither ${LOSS} nor ${ACCURACY}`);
  }
  const fields = drawn(await examplesOf(device));
  const labels = program.inputs.filter((port) => port.role === "label");
  if (!rowsOf(fields) || !labels.every((port) => fields[port.name]?.dims[0])) {
    return verdict(true, "after the self-test alone: there are no labelled examples on this device");
  }
  // The new version first: if it cannot be evaluated, that decides already.
  const value = await evaluated(device, offered, metric, fields);
  await device.gate.passOrWait();
  let [before, why] = [Number.NaN, ""];
  try {
    before = await evaluated(device, running, metric, fields);
  } catch (error) {
    if (!(error instanceof ArchipelError) || error instanceof RoundAbandonedError) throw error;
    // The new version works here and the running one fails, which is a reason to adopt.
    why = ` (${error.message})`;
  }
  const found = { metric, offered: value, running: before };
  if (!Number.isFinite(value)) return verdict(false, `${metric} is ${value}, expected a finite number`, found);
  if (!Number.isFinite(before)) return verdict(true, `version ${running.version} has no ${metric} here${why}`, found);
  // Relative to the running version's value, so that one setting serves losses of any scale.
  const worse = metric === ACCURACY ? before - value : value - before;
  const { maxWorse } = device.config;
  const told = `${metric} ${short(value)} on this device, of version ${running.version} ${short(before)}`;
  if (worse - maxWorse * Math.abs(before) <= 0) return verdict(true, told, found);
  return verdict(false, `${told}: worse by more than ${maxWorse} of that`, found);
}

function evaluateOf(bundle: Bundle): Program | null {
  const name = findProgram(bundle, "evaluate");
  return name === null ? null : bundle.program(name);
}

async function examplesOf(device: Device): Promise<Examples> {
  try {
    return await device.examples();
  } catch (error) {
    throw new ExamplesError(`not compared, the examples cannot be read: ${(error as Error)?.message ?? error}`);
  }
}

async function evaluated(device: Device, content: Content, metric: string, fields: Examples): Promise<number> {
  const runtime = await openContent(content, device, { tested: false });
  try {
    const metrics = await runtime.evaluate({ x: fields });
    return measured(evaluateOf(content.bundle) as Program, metric, metrics, rowsOf(fields));
  } finally {
    runtime.close();
  }
}

function rowsOf(fields: Examples): number {
  return Math.max(0, ...Object.values(fields).map((array) => array.dims[0] ?? 0));
}

/** At most MAX_EXAMPLES, drawn at random; the same ones each time. */
function drawn(fields: Examples): Examples {
  const count = rowsOf(fields);
  if (count <= MAX_EXAMPLES) return fields;
  const rows = Array.from(permutation(count, 0, 0, 0).subarray(0, MAX_EXAMPLES)).sort((one, other) => one - other);
  return Object.fromEntries(Object.entries(fields).map(([name, array]) => [name, taken(array, rows)]));
}

function taken(array: NdArray, rows: readonly number[]): NdArray {
  const [count = 1, ...dims] = array.dims;
  const width = array.data.length / count;
  const data = array.data.slice(0, width * rows.length);
  for (const [at, row] of rows.entries()) {
    data.set(array.data.subarray(row * width, (row + 1) * width) as never, at * width);
  }
  return { dtype: array.dtype, dims: [rows.length, ...dims], data };
}

function short(value: number): string {
  return String(Number(value.toPrecision(6)));
}
