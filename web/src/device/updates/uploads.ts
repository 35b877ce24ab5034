/** What a device uploads in a training round (archipel/protocol/uploads.py and training_metrics.py). */

import { type NdArray, numberAt } from "../../arrays.js";
import type { Manifest } from "../../bundle/manifest.js";
import type { Hyperparameter, Metric, Program, Update } from "../../bundle/roles.js";
import { ProtocolError } from "../errors.js";
import type { RoundPlan } from "../messages/rounds.js";
import { type Arrays, weightPort } from "./bounds.js";
import { Layout } from "./layout.js";

/** Prefixes of the entries with the mean of a metric, with whether it was clamped, and with a count of devices. */
const [TRAINING, CLAMPED, DEVICES] = ["archipel/training/", "archipel/clamped/", "archipel/devices/"];
/** The hyperparameter of `finish` with the round's clip, where the server adapts it. */
const UPDATE_CLIP = "update_clip";
/** The least bits of entries beside packed deltas, which are few. */
const OTHER_BITS = 16;

/** The `finish` program of a training round. Raises ProtocolError where there is none of that name, or not one. */
export function finishProgram(manifest: Manifest, name: string): Program {
  const programs = Object.entries(manifest.programs).filter(([, program]) => program.kind === "finish");
  const found = programs.filter(([key]) => name === "" || key === name);
  if (found.length !== 1) {
    const there = programs.map(([key]) => key).join(", ") || "none";
    throw new ProtocolError(`bundle ${manifest.name}: no single finish program '${name}'; it has: ${there}`);
  }
  return (found[0] as [string, Program])[1];
}

/** The layout of what this finish program uploads at most, and of the device's own entries. Raises ProtocolError. */
export function uploadLayout(manifest: Manifest, program: string): Layout {
  const finish = finishProgram(manifest, program);
  const updates = updatesOf(finish);
  // Checks that there is an update, and one weight at most.
  new Layout(updates);
  return new Layout([...updates, ...trainingEntries(manifest, finish, updates)]);
}

/** The layout of the updates of the plan's round, whose deltas keep to the clip of the plan. Raises ProtocolError. */
export function planLayout(plan: RoundPlan, manifest: Manifest): Layout {
  const layout = uploadLayout(manifest, plan.program);
  const finish = finishProgram(manifest, plan.program);
  const port = finish.inputs.find(
    (input): input is Hyperparameter => input.role === "hyperparameter" && input.name === UPDATE_CLIP,
  );
  if (port === undefined) return layout;
  const clip = plan.hyperparameters[UPDATE_CLIP] ?? port.default;
  return new Layout(layout.updates.map((each) => keepToClip(each, clip)));
}

/** The arrays to upload: those of `finish`, and the device's own entries. Raises ProtocolError. */
export function uploadArrays(
  manifest: Manifest,
  program: string,
  update: Arrays,
  metrics: Readonly<Record<string, number>>,
): Arrays {
  const finish = finishProgram(manifest, program);
  const port = weightPort(updatesOf(finish));
  const weight = port === undefined ? 1 : numberAt(update[port.name] as NdArray, 0);
  const own: Record<string, NdArray> = {};
  const add = (name: string, value: number): void => {
    own[name] = { dtype: "float32", dims: [], data: Float32Array.of(value) };
  };
  for (const [name, bound] of metricRanges(manifest)) {
    const value = metrics[name] ?? Number.NaN;
    if (!Number.isFinite(value)) {
      throw new ProtocolError(`metric '${name}': is ${value} on this device; it cannot be summed`);
    }
    add(TRAINING + name, Math.min(Math.max(value, -bound), bound) * weight);
    add(CLAMPED + name, Math.abs(value) > bound ? weight : 0);
  }
  for (const name of countedMetrics(finish)) {
    const value = metrics[name] ?? Number.NaN;
    if (value !== 0 && value !== 1) {
      throw new ProtocolError(`metric '${name}': is ${value} on this device, expected 0 or 1`);
    }
    add(DEVICES + name, value);
  }
  return { ...update, ...own };
}

function trainingEntries(manifest: Manifest, finish: Program, updates: readonly Update[]): Update[] {
  const weight = weightPort(updates);
  let bits = Math.max(...updates.map((port) => port.bits));
  if (updates.some((port) => port.carries !== null)) bits = Math.max(bits, OTHER_BITS);
  const ranges = metricRanges(manifest);
  const weighting = weight?.weighting ?? "uniform";
  const own = [
    ...ranges.map(([name, range]) => entry(TRAINING + name, { weighting, range, bits })),
    ...ranges.map(([name]) => entry(CLAMPED + name, { weighting, range: 1, bits })),
    // Two bits are -1, 0 and 1: the step is 1, so the sum is a whole number.
    ...countedMetrics(finish).map((name) => entry(DEVICES + name, { weighting: "uniform", range: 1, bits: 2 })),
  ];
  // A program's entry of the same name could stand in for the device's.
  const names = new Set(own.map((port) => port.name));
  const taken = updates.flatMap((port) => [port.name, port.tensor]).find((name) => names.has(name));
  if (taken !== undefined) {
    throw new ProtocolError(`bundle ${manifest.name}: the name '${taken}' is not for programs to use`);
  }
  return own;
}

function entry(name: string, own: Pick<Update, "weighting" | "range" | "bits">): Update {
  const fixed = { dtype: "float32", shape: [], clip: null, lowest: 0, noise: 0, mean: "", carries: null } as const;
  return { role: "update", name, tensor: name, kind: "value", ...fixed, ...own };
}

function updatesOf(program: Program): Update[] {
  return program.outputs.filter((port): port is Update => port.role === "update");
}

/** The metrics of the round's train programs that are summed, with their ranges, in the order of their names. */
function metricRanges(manifest: Manifest): [name: string, range: number][] {
  const programs = manifest.schedule.map((phase) => manifest.programs[phase.program] as Program);
  return sorted(new Map(programs.flatMap(summed)));
}

/** The metrics of `finish` that are summed, each 0 or 1 of a device, in the order of their names. */
function countedMetrics(finish: Program): string[] {
  return sorted(new Map(summed(finish))).map(([name]) => name);
}

function summed(program: Program): [string, number][] {
  const ports = program.outputs.filter((port): port is Metric => port.role === "metric");
  return ports.flatMap((port) => (port.range === null ? [] : [[port.name, port.range] as [string, number]]));
}

function sorted(ranges: ReadonlyMap<string, number>): [string, number][] {
  return [...ranges].sort(([one], [other]) => (one < other ? -1 : 1));
}

function keepToClip(port: Update, clip: number): Update {
  if (port.kind !== "delta" || port.clip === null || clip >= port.clip) return port;
  // A rotation's elements are as much smaller as the whole update is, so their steps can be.
  const range = port.carries?.method === "rotation" ? port.range * (clip / port.clip) : port.range;
  return { ...port, clip, range };
}
