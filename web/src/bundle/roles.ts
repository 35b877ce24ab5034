/**
 * Roles: what each input and output of a program means. They are all that a device understands.
 *
 * A port is one graph input or output. `name` is the graph's own name for it; `tensor` is the logical tensor that it
 * reads or writes, the same in every program of a bundle. For `example`, `label` and `example_weight` the name is at
 * the same time the name of the field in the local data. A string in `shape` is a symbolic dimension.
 */

import {
  type Decoded,
  DecodeError,
  type Decoder,
  type Fields,
  float,
  integer,
  list,
  mismatch,
  nullable,
  oneOf,
  optional,
  required,
  struct,
  text,
  textOr,
} from "./decoders.js";
import type { JsonNode } from "./json.js";

export const DTYPES = [
  "float16",
  "float32",
  "float64",
  "int8",
  "uint8",
  "int16",
  "uint16",
  "int32",
  "uint32",
  "int64",
  "uint64",
  "bool",
] as const;

export type DType = (typeof DTYPES)[number];
export type Dim = number | string;
export type Lifetime = "step" | "round" | "device";

interface Common {
  readonly name: string;
  readonly dtype: DType;
  readonly shape: readonly Dim[];
}

interface Named extends Common {
  readonly tensor: string;
}

export interface Example extends Common {
  readonly role: "example";
}
export interface Label extends Common {
  readonly role: "label";
}
export interface ExampleWeight extends Common {
  readonly role: "example_weight";
}
/** What `features` computes of each example once. */
export interface Feature extends Common {
  readonly role: "feature";
}
/**
 * What `predict` answers for the batch, in its output `output`.
 *
 * `evaluate` reads answers and no parameters, so it can only measure the program that the device predicts with.
 */
export interface Prediction extends Common {
  readonly role: "prediction";
  readonly output: string;
}
export interface Parameter extends Named {
  readonly role: "parameter";
}
/** The value that parameter `tensor` had when the round started. */
export interface Start extends Named {
  readonly role: "start";
}
/** Like a parameter, but it never leaves the device. First value: the tensor `init` (null: of its own name). */
export interface Personal extends Named {
  readonly role: "personal";
  readonly init: string | null;
}
/** Kept between steps. `init` fills it, or names a tensor of the weights; `lifetime` says when it goes back to that. */
export interface State extends Named {
  readonly role: "state";
  readonly lifetime: Lifetime;
  readonly init: number | string;
}
export interface Broadcast extends Named {
  readonly role: "broadcast";
}
export interface Hyperparameter extends Common {
  readonly role: "hyperparameter";
  readonly default: number;
  readonly minimum: number;
  readonly maximum: number;
}
export interface Count extends Common {
  readonly role: "count";
  readonly of: "examples" | "steps";
}
export interface Step extends Common {
  readonly role: "step";
}
export interface Seed extends Common {
  readonly role: "seed";
}
/** Exact samples for differential privacy, from a cryptographic generator, never from `seed`. */
export interface Noise extends Common {
  readonly role: "noise";
  readonly distribution: "gaussian" | "discrete_gaussian";
  readonly scale: number;
  /** `scale` over the sensitivity; 0 where the publisher does not state it. */
  readonly multiplier: number;
}
export interface Output extends Common {
  readonly role: "output";
}
/** Of `refresh`: the new value of the initializer `tensor` of the `predict` graph. */
export interface Derived extends Named {
  readonly role: "derived";
}
/** An update entry holds the changes of these parameters as one vector, rotated in blocks (`update_seed`). */
export interface Rotation {
  readonly method: "rotation";
  readonly parameters: readonly string[];
  readonly block: number;
  /** How many of its elements the entry has; 0: all. */
  readonly taken: number;
}
/** The same without rotation; at most `most` elements are not 0, those with the largest absolute values. */
export interface Largest {
  readonly method: "largest";
  readonly parameters: readonly string[];
  readonly most: number;
}
/** An update entry holds two factors of one parameter's change; `finish` reads their bases as broadcasts. */
export interface LowRank {
  readonly method: "low_rank";
  readonly parameters: readonly string[];
}
export type Carried = Rotation | Largest | LowRank;
export interface Update extends Named {
  readonly role: "update";
  readonly kind: "delta" | "weight" | "value" | "mean" | "variance";
  readonly weighting: "examples" | "uniform" | "steps";
  readonly range: number;
  readonly bits: number;
  readonly clip: number | null;
  readonly lowest: number;
  readonly noise: number;
  /** Of a running variance: the parameter that is its mean. */
  readonly mean: string;
  /** Of a delta that holds the changes of several parameters in another form. */
  readonly carries: Carried | null;
}
/** The kinds of update entries that change a parameter. */
export const CHANGES: ReadonlySet<Update["kind"]> = new Set<Update["kind"]>(["delta", "mean", "variance"]);
export interface Metric extends Common {
  readonly role: "metric";
  readonly reduction: "sum" | "mean" | "last";
  readonly range: number | null;
}

export type Port =
  | Example
  | Label
  | ExampleWeight
  | Feature
  | Prediction
  | Parameter
  | Start
  | Personal
  | State
  | Broadcast
  | Hyperparameter
  | Count
  | Step
  | Seed
  | Noise
  | Output
  | Derived
  | Update
  | Metric;

export type Role = Port["role"];

export const PROGRAM_KINDS = [
  "predict",
  "evaluate",
  "features",
  "train",
  "begin",
  "finish",
  "refresh",
  "analyze",
] as const;
export type ProgramKind = (typeof PROGRAM_KINDS)[number];

/** A graph and the meaning of its inputs and outputs. `steps` is how many minibatches a train program takes at once. */
export interface Program {
  readonly kind: ProgramKind;
  readonly inputs: readonly Port[];
  readonly outputs: readonly Port[];
  readonly file: string;
  readonly steps: number;
  readonly repeats: string;
}

const DATA: readonly Role[] = ["example", "label", "example_weight"];
const MODEL: readonly Role[] = ["parameter", "personal", "state"];

/** Which roles each kind of program may read and write. */
export const ALLOWED: Readonly<Record<ProgramKind, readonly [ReadonlySet<Role>, ReadonlySet<Role>]>> = {
  predict: [new Set<Role>(["example", ...MODEL, "hyperparameter"]), new Set<Role>(["output"])],
  evaluate: [new Set<Role>(["prediction", "label", "example_weight", "hyperparameter"]), new Set<Role>(["metric"])],
  features: [new Set<Role>(["example"]), new Set<Role>(["feature"])],
  train: [
    new Set<Role>([
      ...DATA,
      "feature",
      ...MODEL,
      "start",
      "broadcast",
      "hyperparameter",
      "count",
      "step",
      "seed",
      "noise",
    ]),
    new Set<Role>([...MODEL, "metric"]),
  ],
  begin: [new Set<Role>([...MODEL, "broadcast", "hyperparameter", "seed"]), new Set<Role>(["state", "personal"])],
  finish: [
    new Set<Role>([...MODEL, "start", "broadcast", "hyperparameter", "count", "seed", "noise"]),
    new Set<Role>(["update", "state", "personal", "metric"]),
  ],
  refresh: [new Set<Role>(MODEL), new Set<Role>(["derived"])],
  // No seed: a number that differs from device to device would give each a place of its own in the sum.
  analyze: [new Set<Role>([...DATA, ...MODEL, "hyperparameter", "noise"]), new Set<Role>(["update"])],
};

const COMMON: Fields<Common> = {
  name: required(text),
  dtype: required(oneOf(...DTYPES)),
  shape: required(list(textOr(integer))),
};
const NAMED: Fields<Named> = { ...COMMON, tensor: required(text) };

function port<T extends Port>(role: T["role"], fields: Fields<Omit<T, "role">>): Decoder<Port> {
  // The tag is the one field that `struct` adds by itself.
  return struct<Omit<T, "role">>(fields, ["role", role]) as unknown as Decoder<Port>;
}

const STATE = port<State>("state", {
  ...NAMED,
  lifetime: required(oneOf("step", "round", "device")),
  init: optional(textOr(float), 0),
});
const PERSONAL = port<Personal>("personal", { ...NAMED, init: optional(nullable(text), null, "null") });
const PARAMETER = port<Parameter>("parameter", NAMED);
const FEATURE = port<Feature>("feature", COMMON);

const INPUTS: ReadonlyMap<string, Decoder<Port>> = new Map<string, Decoder<Port>>([
  ["example", port<Example>("example", COMMON)],
  ["label", port<Label>("label", COMMON)],
  ["example_weight", port<ExampleWeight>("example_weight", COMMON)],
  ["feature", FEATURE],
  ["prediction", port<Prediction>("prediction", { ...COMMON, output: required(text) })],
  ["parameter", PARAMETER],
  ["start", port<Start>("start", NAMED)],
  ["personal", PERSONAL],
  ["state", STATE],
  ["broadcast", port<Broadcast>("broadcast", NAMED)],
  [
    "hyperparameter",
    port<Hyperparameter>("hyperparameter", {
      ...COMMON,
      default: required(float),
      minimum: required(float),
      maximum: required(float),
    }),
  ],
  ["count", port<Count>("count", { ...COMMON, of: required(oneOf("examples", "steps")) })],
  ["step", port<Step>("step", COMMON)],
  ["seed", port<Seed>("seed", COMMON)],
  [
    "noise",
    port<Noise>("noise", {
      ...COMMON,
      distribution: required(oneOf("gaussian", "discrete_gaussian")),
      scale: required(float),
      multiplier: optional(float, 0),
    }),
  ],
]);

const PARAMETERS = required(list(text));
const ROTATION = struct<Omit<Rotation, "method">>(
  { parameters: PARAMETERS, block: required(integer), taken: optional(integer, 0, "0") },
  ["method", "rotation"],
) as unknown as Decoder<Carried>;
const LARGEST = struct<Omit<Largest, "method">>({ parameters: PARAMETERS, most: required(integer) }, [
  "method",
  "largest",
]) as unknown as Decoder<Carried>;

const LOW_RANK = struct<Omit<LowRank, "method">>({ parameters: PARAMETERS }, ["method", "low_rank"]) as unknown as Decoder<Carried>;
const CARRIED: ReadonlyMap<string, Decoder<Carried>> = new Map([
  ["rotation", ROTATION],
  ["largest", LARGEST],
  ["low_rank", LOW_RANK],
]);

const carried: Decoder<Carried> = (node, where) => {
  const method = node.type === "object" ? node.members.get("method") : undefined;
  const decoder = method?.type === "string" ? CARRIED.get(method.value) : undefined;
  if (decoder === undefined) throw mismatch(`a method of ${[...CARRIED.keys()].join(", ")}`, node, where);
  return decoder(node, where);
};

const OUTPUTS: ReadonlyMap<string, Decoder<Port>> = new Map<string, Decoder<Port>>([
  ["output", port<Output>("output", COMMON)],
  ["feature", FEATURE],
  ["parameter", PARAMETER],
  ["personal", PERSONAL],
  ["state", STATE],
  ["derived", port<Derived>("derived", NAMED)],
  [
    "update",
    port<Update>("update", {
      ...NAMED,
      kind: required(oneOf("delta", "weight", "value", "mean", "variance")),
      weighting: required(oneOf("examples", "uniform", "steps")),
      range: required(float),
      bits: required(integer),
      clip: optional(nullable(float), null, "null"),
      lowest: optional(float, 0),
      noise: optional(float, 0),
      mean: optional(text, "", '""'),
      carries: optional(nullable(carried), null, "null"),
    }),
  ],
  [
    "metric",
    port<Metric>("metric", {
      ...COMMON,
      reduction: required(oneOf("sum", "mean", "last")),
      range: optional(nullable(float), null, "null"),
    }),
  ],
]);

/** A role that this library does not know, or none at all. */
export class RoleDecodeError extends DecodeError {}

function byRole(decoders: ReadonlyMap<string, Decoder<Port>>): Decoder<Port> {
  return (node: JsonNode, where: string): Decoded<Port> => {
    const tag = node.type === "object" ? node.members.get("role") : undefined;
    const decoder = tag?.type === "string" ? decoders.get(tag.value) : undefined;
    if (decoder === undefined) {
      const got = tag?.type === "string" ? JSON.stringify(tag.value.slice(0, 64)) : "none";
      throw new RoleDecodeError(`expected a role of ${[...decoders.keys()].join(", ")}; got ${got}`, `${where}.role`);
    }
    return decoder(node, where);
  };
}

export const programDecoder: Decoder<Program> = struct<Program>({
  kind: required(oneOf(...PROGRAM_KINDS)),
  inputs: required(list(byRole(INPUTS))),
  outputs: required(list(byRole(OUTPUTS))),
  file: optional(text, "", '""'),
  steps: optional(integer, 1, "1"),
  repeats: optional(text, "", '""'),
});

/** The logical tensor that a port reads or writes, null for one that has none. */
export function tensorOf(port: Port): string | null {
  return "tensor" in port ? port.tensor : null;
}
