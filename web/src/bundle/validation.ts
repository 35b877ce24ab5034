/** The rules of a manifest that its types cannot say, each with its own error. */

import { ManifestError, TensorLayoutError, UnsafePathError } from "../errors.js";
import { validateCarried } from "./carried.js";
import type { Manifest, Phase, TensorSpec } from "./manifest.js";
import { validateMetrics } from "./metric_rules.js";
import { validateMoments } from "./moments.js";
import { validateStatistics } from "./statistics.js";
import { ALLOWED, CHANGES, type DType, type Dim, type Port, type Program, type Role, tensorOf } from "./roles.js";

export const MANIFEST_FILE = "manifest.json";
export const SIGNATURE_FILE = "manifest.sig";
export const MAX_TENSOR_BYTES = 2 ** 31;
export const MAX_RANK = 8;
export const MAX_BITS = 30;
const MAX_NOISE = 1e6;
export const MAX_SITE = 2 ** 20;
export const MAX_LEVELS = 3;
export const MAX_QUERIES = 256;
export const MAX_POPULATIONS = 64;

export const ITEM_BYTES: Readonly<Record<DType, number>> = {
  float16: 2,
  float32: 4,
  float64: 8,
  int8: 1,
  uint8: 1,
  int16: 2,
  uint16: 2,
  int32: 4,
  uint32: 4,
  int64: 8,
  uint64: 8,
  bool: 1,
};

/** Roles that have an axis for the steps of a program of several, in front. */
export const PER_STEP: ReadonlySet<Role> = new Set<Role>(["example", "label", "example_weight", "feature", "noise"]);

const FILE_NAME = /^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$/;
const SHA256 = /^[0-9a-f]{64}$/;
const PRINTABLE = /^(?:[^\p{C}\p{Z}]| )+$/u;

/** Check what the types cannot say. Raises ManifestError, UnsafePathError or TensorLayoutError. */
export function validateManifest(manifest: Manifest): void {
  checkText("name", manifest.name);
  for (const [path, digest] of Object.entries(manifest.files)) {
    checkFileName(path);
    if (path === MANIFEST_FILE || path === SIGNATURE_FILE) {
      throw new ManifestError(`manifest: ${path} cannot hold its own digest`);
    }
    checkDigest(`files[${path}]`, digest);
  }
  const parameters = validateParameters(manifest.parameters);
  const declared = new Map<string, string>();
  for (const [name, program] of Object.entries(manifest.programs)) {
    validateProgram(name, program, manifest.files, parameters, declared);
    validateBounds(`program ${quoted(name)}`, program, manifest.strategy !== "");
    validateMoments(`program ${quoted(name)}`, program);
    validateCarried(`program ${quoted(name)}`, program, parameters);
  }
  validateFeatures(manifest.programs);
  validatePredictions(manifest.programs);
  validateMetrics(manifest.programs);
  for (const [name, program] of Object.entries(manifest.programs)) {
    if (program.repeats) validateRepeats(name, program, manifest.programs);
  }
  manifest.schedule.forEach((phase, index) => validatePhase(index, phase, manifest.programs));
  for (const { name } of manifest.statistics) checkText("statistics[].name", name);
  validateStatistics(manifest.statistics, manifest.programs);
  validateSelfTest(manifest);
  validatePolicy(manifest);
  validateValidity(manifest);
  if (manifest.source !== "" && manifest.files[manifest.source] === undefined) {
    throw new ManifestError(`manifest: source ${quoted(manifest.source)} is not among the bundle's files`);
  }
  if (manifest.lineage.parent !== null) checkDigest("lineage.parent", manifest.lineage.parent);
  const { peak_bytes, flops_per_example, upload_bytes } = manifest.limits;
  if (Math.min(peak_bytes, flops_per_example, upload_bytes) < 0) {
    throw new ManifestError("manifest: limits must not be negative");
  }
}

/** A bundle is flat: plain names only. */
export function checkFileName(path: string): void {
  if (!FILE_NAME.test(path)) {
    throw new UnsafePathError(`bundle: file name ${quoted(path)} is not a plain name (letters, digits, '.', '_', '-')`);
  }
}

/** 1 to `most` characters, none of them a control, format, private or unassigned one, no space but U+0020. */
export function isPrintable(value: string, most = 256): boolean {
  return value.length <= 2 * most && PRINTABLE.test(value) && [...value].length <= most;
}

function validateValidity(manifest: Manifest): void {
  const { sequence, not_after, populations } = manifest;
  for (const value of [sequence, not_after]) {
    if (!(value >= 0 && value <= Number.MAX_SAFE_INTEGER)) {
      throw new ManifestError(`manifest: sequence and not_after must be from 0 to ${Number.MAX_SAFE_INTEGER}`);
    }
  }
  const sorted = populations.every((name, index) => index === 0 || (populations[index - 1] ?? "") < name);
  if (populations.length > MAX_POPULATIONS || !sorted) {
    throw new ManifestError(`manifest: populations must be at most ${MAX_POPULATIONS} names, each once and sorted`);
  }
  for (const name of populations) {
    if (!FILE_NAME.test(name)) {
      throw new ManifestError(`manifest: population ${JSON.stringify(name.slice(0, 64))} is not a plain name`);
    }
  }
}

function validateParameters(specs: readonly TensorSpec[]): Map<string, TensorSpec> {
  const parameters = new Map<string, TensorSpec>();
  for (const spec of specs) {
    const where = `parameter ${quoted(spec.name)}`;
    checkText("parameters[].name", spec.name);
    checkDigest(where, spec.sha256);
    checkShape(where, spec.shape);
    const bytes = spec.shape.reduce((size, dim) => size * dim, ITEM_BYTES[spec.dtype]);
    if (bytes > MAX_TENSOR_BYTES) {
      throw new TensorLayoutError(`${where}: ${bytes} bytes, the limit is ${MAX_TENSOR_BYTES} (2 GiB)`);
    }
    if (parameters.has(spec.name)) throw new ManifestError(`manifest: ${where} is listed twice`);
    parameters.set(spec.name, spec);
  }
  return parameters;
}

function validateProgram(
  name: string,
  program: Program,
  files: Readonly<Record<string, string>>,
  parameters: ReadonlyMap<string, TensorSpec>,
  declared: Map<string, string>,
): void {
  const where = `program ${quoted(name)}`;
  checkText("program name", name);
  if (files[program.file] === undefined) {
    throw new ManifestError(`${where}: its file ${quoted(program.file)} is not among the bundle's files`);
  }
  if (!program.outputs.length) throw new ManifestError(`${where}: it has no outputs`);
  if (program.steps < 1 || (program.steps > 1 && program.kind !== "train")) {
    throw new ManifestError(`${where}: steps must be 1, or more in a train program; it is ${program.steps}`);
  }
  if (program.steps > 1 !== (program.repeats !== "")) {
    throw new ManifestError(`${where}: a program of several steps, and no other, names the one that it repeats`);
  }
  const [reads, writes] = ALLOWED[program.kind];
  for (const [ports, allowed, side] of [
    [program.inputs, reads, "inputs"],
    [program.outputs, writes, "outputs"],
  ] as const) {
    if (new Set(ports.map((port) => port.name)).size !== ports.length) {
      throw new ManifestError(`${where}: two ${side} have the same name`);
    }
    const tensors = ports.filter((port) => tensorOf(port) !== null).map((port) => `${port.role} ${tensorOf(port)}`);
    if (new Set(tensors).size !== tensors.length) {
      throw new ManifestError(`${where}: two ${side} have the same role and tensor`);
    }
    for (const port of ports) {
      if (!allowed.has(port.role)) {
        throw new ManifestError(`${where}: a ${program.kind} program cannot have '${port.role}' among its ${side}`);
      }
      validatePort(where, port, parameters, program.steps);
      const [key, declaration] = declarationOf(port);
      if (!declared.has(key)) declared.set(key, declaration);
      if (declared.get(key) !== declaration) {
        throw new ManifestError(`${where}: ${quoted(key)} is declared differently in another program`);
      }
    }
  }
}

function validatePort(where: string, port: Port, parameters: ReadonlyMap<string, TensorSpec>, steps: number): void {
  const here = `${where}: ${port.role} ${quoted(port.name)}`;
  checkText(`${here}: name`, port.name);
  checkShape(here, port.shape);
  const tensor = tensorOf(port);
  if (tensor !== null) checkText(`${here}: tensor`, tensor);
  if (port.role === "update") validateUpdate(here, port);
  if (port.role === "parameter" || port.role === "start" || (port.role === "update" && CHANGES.has(port.kind) && port.carries === null)) {
    const spec = parameters.get(port.tensor);
    if (spec === undefined) {
      throw new ManifestError(`${here}: ${quoted(port.tensor)} is not one of the bundle's parameters`);
    }
    if (!sameShape(port.shape, spec.shape) || (port.dtype !== spec.dtype && port.role !== "update")) {
      throw new ManifestError(
        `${here}: ${port.dtype}[${port.shape}], but parameter ${quoted(port.tensor)} is ${spec.dtype}[${spec.shape}]`,
      );
    }
  }
  if (
    port.role === "hyperparameter" &&
    (port.shape.length || !(port.minimum <= port.default && port.default <= port.maximum))
  ) {
    throw new ManifestError(`${here}: must be a scalar with minimum <= default <= maximum`);
  }
  const several = steps > 1 ? [steps] : [];
  if (port.role === "metric" && !sameShape(port.shape, several)) {
    throw new ManifestError(`${here}: must have shape [${several}], has [${port.shape}]`);
  }
  if (PER_STEP.has(port.role) && !sameShape(port.shape.slice(0, several.length), several)) {
    throw new ManifestError(
      `${here}: its first axis must be the program's ${steps} steps, its shape is [${port.shape}]`,
    );
  }
  if ((port.role === "count" || port.role === "step" || port.role === "seed") && port.shape.length) {
    throw new ManifestError(`${here}: must be a scalar, has shape [${port.shape}]`);
  }
  if (port.role === "noise") {
    if (!(port.scale > 0)) throw new ManifestError(`${here}: scale must be above 0`);
    if (!(port.multiplier >= 0 && port.multiplier < Infinity)) {
      throw new ManifestError(`${here}: multiplier must be at least 0`);
    }
  }
}

function validateFeatures(programs: Readonly<Record<string, Program>>): void {
  const makers = Object.entries(programs).filter(([, program]) => program.kind === "features");
  if (makers.length > 1) {
    throw new ManifestError(`programs ${makers.map(([name]) => quoted(name))}: one features program at most`);
  }
  const made = new Map((makers[0]?.[1].outputs ?? []).map((port) => [port.name, port]));
  for (const [name, program] of Object.entries(programs)) {
    for (const port of program.inputs) {
      if (port.role !== "feature") continue;
      const source = made.get(port.name);
      if (source === undefined) {
        throw new ManifestError(`program ${quoted(name)}: no features program makes ${quoted(port.name)}`);
      }
      const shape = program.steps > 1 ? port.shape.slice(1) : port.shape;
      if (
        source.dtype !== port.dtype ||
        source.shape.length !== shape.length ||
        !sameShape(source.shape.slice(1), shape.slice(1))
      ) {
        throw new ManifestError(
          `program ${quoted(name)}: feature ${quoted(port.name)} is ${port.dtype}[${shape}], the features program ` +
            `makes ${source.dtype}[${source.shape}]`,
        );
      }
    }
  }
}

function validatePredictions(programs: Readonly<Record<string, Program>>): void {
  const makers = Object.values(programs).filter((program) => program.kind === "predict");
  const answers = new Map((makers.length === 1 ? (makers[0] as Program).outputs : []).map((port) => [port.name, port]));
  for (const [name, program] of Object.entries(programs)) {
    const ports = program.inputs.filter((port) => port.role === "prediction");
    if (program.kind === "evaluate" && !ports.length) {
      throw new ManifestError(`program ${quoted(name)}: an evaluate program reads at least one prediction`);
    }
    for (const port of ports) {
      const answer = answers.get(port.output);
      if (answer === undefined) {
        throw new ManifestError(
          `program ${quoted(name)}: ${quoted(port.output)} is no output of the one predict program`,
        );
      }
      if (answer.dtype !== port.dtype || !mayAgree(answer.shape, port.shape)) {
        throw new ManifestError(
          `program ${quoted(name)}: prediction ${quoted(port.name)} is ${port.dtype}[${port.shape}], predict answers ` +
            `${answer.dtype}[${answer.shape}]`,
        );
      }
    }
  }
}

/** Whether the ranks and the fixed sizes are equal; that of a symbolic axis is known only when the programs run. */
function mayAgree(first: readonly Dim[], second: readonly Dim[]): boolean {
  return (
    first.length === second.length &&
    first.every((dim, axis) => typeof dim === "string" || typeof second[axis] === "string" || dim === second[axis])
  );
}

function validateRepeats(name: string, program: Program, programs: Readonly<Record<string, Program>>): void {
  const where = `program ${quoted(name)}`;
  const once = programs[program.repeats];
  if (once === undefined || once.kind !== "train" || once.steps !== 1) {
    throw new ManifestError(`${where}: repeats ${quoted(program.repeats)}, which is not a train program of 1 step`);
  }
  for (const [side, single, several] of [
    ["inputs", once.inputs, program.inputs],
    ["outputs", once.outputs, program.outputs],
  ] as const) {
    const expected = single.map((port) =>
      port.role === "metric" || PER_STEP.has(port.role) ? { ...port, shape: [program.steps, ...port.shape] } : port,
    );
    // All ports come from one decoder, so equal ports have their fields in the same order.
    if (JSON.stringify(expected) !== JSON.stringify(several)) {
      throw new ManifestError(
        `${where}: its ${side} are not those of ${quoted(program.repeats)}, ${program.steps} times`,
      );
    }
  }
}

function validateSelfTest(manifest: Manifest): void {
  const test = manifest.self_test;
  if (test === null) return;
  if (manifest.files[test.file] === undefined) {
    throw new ManifestError(`self_test: its file ${quoted(test.file)} is not among the bundle's files`);
  }
  if (!Object.values(manifest.programs).some((program) => program.kind === "predict")) {
    throw new ManifestError("self_test: there is no predict program to test");
  }
  if (!(test.rtol >= 0 && test.atol >= 0)) {
    throw new ManifestError("self_test: rtol and atol must be finite and not negative");
  }
}

function validateUpdate(here: string, port: Port & { readonly role: "update" }): void {
  if (port.shape.some((dim) => typeof dim === "string")) {
    throw new ManifestError(`${here}: an update's shape must be fixed, is [${port.shape}]`);
  }
  if (port.dtype !== "float32") throw new ManifestError(`${here}: an update is float32, not ${port.dtype}`);
  if (!(port.range > 0)) throw new ManifestError(`${here}: range must be above 0 and finite`);
  if (!(port.bits >= 2 && port.bits <= MAX_BITS)) {
    throw new ManifestError(`${here}: bits must be from 2 to ${MAX_BITS}`);
  }
  if (port.clip !== null && !(port.clip > 0)) {
    throw new ManifestError(`${here}: clip must be above 0 and finite, or absent`);
  }
  if (!(port.noise >= 0)) throw new ManifestError(`${here}: noise must be at least 0 and finite`);
  if (port.kind === "weight" && port.shape.length) {
    throw new ManifestError(`${here}: the weight is a scalar, has shape [${port.shape}]`);
  }
  if (!(port.kind === "weight" ? port.lowest >= 0 && port.lowest <= port.range : port.lowest === 0)) {
    throw new ManifestError(`${here}: lowest is of a weight, from 0 to its range; it is ${port.lowest}`);
  }
}

/** What the bounds of sums are computed with. `trains`: the sum is what a strategy makes its next step of. */
function validateBounds(where: string, program: Program, trains: boolean): void {
  const updates = program.outputs.filter((port) => port.role === "update");
  for (const kind of ["delta", "value"]) {
    const clips = new Set(updates.flatMap((port) => (port.kind === kind && port.clip !== null ? [port.clip] : [])));
    if (clips.size > 1) {
      throw new ManifestError(`${where}: its ${kind} entries are clipped together, to one norm, not [${[...clips]}]`);
    }
  }
  if (!trains || program.kind !== "finish") return;
  for (const port of updates) {
    const step = port.range / (2 ** (port.bits - 1) - 1);
    if (port.kind === "weight" && port.lowest < step) {
      throw new ManifestError(
        `${where}: update ${quoted(port.name)}: lowest is ${port.lowest}, must be at least a step (${step}); without a ` +
          "least weight one device could make the sum of weights as small as it likes",
      );
    }
  }
  if (program.inputs.some((port) => port.role === "noise") && !updates.some((port) => port.noise > 0)) {
    throw new ManifestError(`${where}: reads noise; state in its update entries how much of it they have (noise)`);
  }
}

/** What must agree wherever the same logical tensor appears: dtype, shape, and how it begins. */
function declarationOf(port: Port): [key: string, declaration: string] {
  const key = (name: string): string => `${port.role} ${name}`;
  switch (port.role) {
    case "parameter":
      return [key(port.name), JSON.stringify([port.dtype, port.shape])];
    case "hyperparameter":
      return [key(port.name), JSON.stringify([port.default, port.minimum, port.maximum])];
    case "state":
      return [key(port.tensor), JSON.stringify([port.dtype, port.shape, port.lifetime, port.init])];
    case "personal":
      return [key(port.tensor), JSON.stringify([port.dtype, port.shape, port.init])];
    default: {
      const tensor = tensorOf(port);
      return tensor === null ? [key(port.name), ""] : [key(tensor), JSON.stringify([port.dtype, port.shape])];
    }
  }
}

function validatePhase(index: number, phase: Phase, programs: Readonly<Record<string, Program>>): void {
  const where = `schedule[${index}]`;
  const program = programs[phase.program];
  if (program === undefined || program.kind !== "train") {
    throw new ManifestError(`${where}: ${quoted(phase.program)} is not a train program of this bundle`);
  }
  if (program.steps > 1) {
    throw new ManifestError(
      `${where}: ${quoted(phase.program)} makes ${program.steps} steps; name ${quoted(program.repeats)}`,
    );
  }
  if ((phase.epochs === null) === (phase.steps === null)) {
    throw new ManifestError(`${where}: give either epochs or steps`);
  }
  if (Math.min(phase.epochs ?? phase.steps ?? 0, phase.batch_size) < 1) {
    throw new ManifestError(`${where}: epochs, steps and batch_size must be at least 1`);
  }
  const written = new Set(
    program.outputs.filter((port) => port.role === "parameter" || port.role === "personal").map(tensorOf),
  );
  for (const tensor of phase.moves ?? []) {
    if (!written.has(tensor)) {
      throw new ManifestError(`${where}: moves ${quoted(tensor)}, which ${quoted(phase.program)} does not write`);
    }
  }
}

function validatePolicy(manifest: Manifest): void {
  const policy = manifest.privacy;
  if (!policy.modes.length) throw new ManifestError("privacy: modes must name at least one of 'secure', 'plain'");
  if (policy.modes.includes("secure") && !(policy.min_cohort >= 2 && policy.threshold > 0.5 && policy.threshold <= 1)) {
    // Above one half, or two disjoint groups could each unmask (Bonawitz et al. 2017, section 6.2).
    throw new ManifestError("privacy: secure mode needs min_cohort >= 2 and threshold above 0.5 and at most 1");
  }
  if (!(policy.colluders >= 0 && policy.colluders < 1)) {
    throw new ManifestError(`privacy: colluders must be a share from 0 to below 1, is ${policy.colluders}`);
  }
  if (!policy.protocols.length || !(policy.dropouts >= 0 && policy.dropouts < 1)) {
    throw new ManifestError(
      "privacy: protocols must name at least one of 'complete', 'neighbours', 'neighbours-mlkem', and dropouts be " +
        `a share from 0 to below 1, is ${policy.dropouts}`,
    );
  }
  if (!(policy.noise_multiplier >= 0 && policy.noise_multiplier <= MAX_NOISE)) {
    throw new ManifestError(`privacy: noise_multiplier must be from 0 to ${MAX_NOISE}, is ${policy.noise_multiplier}`);
  }
  const queries = policy.queries >= 1 && policy.queries <= MAX_QUERIES;
  if (!(policy.min_contributors >= 1) || !queries || !(policy.query_days >= 1 && policy.query_days <= 366)) {
    throw new ManifestError(
      `privacy: min_contributors must be at least 1, queries from 1 to ${MAX_QUERIES}, query_days from 1 to 366`,
    );
  }
  if (!(policy.max_clip > 0) || !(policy.max_bits >= 2 && policy.max_bits <= MAX_BITS)) {
    throw new ManifestError(`privacy: max_clip must be above 0 and finite, max_bits from 2 to ${MAX_BITS}`);
  }
  if (!(policy.max_value > 0 && policy.max_server_lr > 0)) {
    throw new ManifestError("privacy: max_value and max_server_lr must be above 0 and finite");
  }
  const sites = policy.aggregators;
  if (sites === null) return;
  const where = "privacy: aggregators:";
  const least = sites.min_site_cohort;
  if (!(policy.min_cohort <= least && least <= sites.max_site_cohort && sites.max_site_cohort <= MAX_SITE)) {
    throw new ManifestError(
      `${where} min_site_cohort ${least} must be from min_cohort ${policy.min_cohort} to max_site_cohort ` +
        `${sites.max_site_cohort}, and that at most ${MAX_SITE}`,
    );
  }
  const shared = sites.threshold > 0.5 && sites.threshold <= 1 && sites.colluders >= 0 && sites.colluders < 1;
  if (!(sites.min_cohort >= 2 && shared)) {
    throw new ManifestError(
      `${where} min_cohort must be at least 2, threshold above 0.5 and at most 1, colluders a share from 0 to below 1`,
    );
  }
  if (!(sites.levels >= 1 && sites.levels <= MAX_LEVELS)) {
    throw new ManifestError(`${where} levels must be from 1 to ${MAX_LEVELS}, is ${sites.levels}`);
  }
}

function checkText(where: string, value: string): void {
  if (!isPrintable(value)) {
    throw new ManifestError(`${where}: expected 1 to 256 printable characters, got ${quoted(value)}`);
  }
}

function checkDigest(where: string, value: string): void {
  if (!SHA256.test(value)) {
    throw new ManifestError(`${where}: expected a SHA-256 in 64 hexadecimal digits, got ${quoted(value)}`);
  }
}

function checkShape(where: string, shape: readonly Dim[]): void {
  if (shape.length > MAX_RANK) {
    throw new TensorLayoutError(`${where}: rank ${shape.length}, the limit is ${MAX_RANK}`);
  }
  for (const dim of shape) {
    if (typeof dim === "string") checkText(`${where}: dimension`, dim);
    else if (!(dim >= 0 && dim <= MAX_TENSOR_BYTES)) {
      throw new TensorLayoutError(`${where}: dimension ${dim} is not from 0 to ${MAX_TENSOR_BYTES}`);
    }
  }
}

function sameShape(first: readonly Dim[], second: readonly Dim[]): boolean {
  return first.length === second.length && first.every((dim, axis) => dim === second[axis]);
}

function quoted(value: string): string {
  return JSON.stringify(value.slice(0, 80));
}
