/** The manifest: what a bundle holds, in canonical JSON. Decoding is strict and every rule has its own error. */

import { ManifestError, UnknownRoleError, UnknownVersionError } from "../errors.js";
import {
  DecodeError,
  dictionary,
  float,
  integer,
  list,
  nullable,
  oneOf,
  optional,
  required,
  struct,
  text,
} from "./decoders.js";
import { JsonSyntaxError, parseJson } from "./json.js";
import { type DType, DTYPES, type Program, programDecoder, RoleDecodeError } from "./roles.js";
import { type Statistic, statistic } from "./statistics.js";
import { validateManifest } from "./validation.js";

export { MANIFEST_FILE, SIGNATURE_FILE } from "./validation.js";

export const FORMAT_VERSION = 1;
export const WEIGHTS_FILE = "weights.safetensors";
export const MAX_MANIFEST_BYTES = 4 << 20;

/** A parameter: its values are in weights.safetensors under the same name. `sha256` is over its raw bytes. */
export interface TensorSpec {
  readonly name: string;
  readonly dtype: DType;
  readonly shape: readonly number[];
  readonly sha256: string;
}

/** One part of a local round: run `program` for `epochs` or for `steps`, in shuffled batches. */
export interface Phase {
  readonly program: string;
  readonly batch_size: number;
  readonly epochs: number | null;
  readonly steps: number | null;
  /** The parameters and personal tensors that take their new values; null: all that the program writes. */
  readonly moves: readonly string[] | null;
}

/**
 * Examples and the outputs that `predict` must give for them, to `atol + rtol * |expected|`. The examples are
 * pseudo-random numbers ("drawn") or the publisher's ("given").
 */
export interface SelfTest {
  readonly file: string;
  readonly rtol: number;
  readonly atol: number;
  readonly source: "" | "drawn" | "given";
}

export interface Limits {
  readonly peak_bytes: number;
  readonly flops_per_example: number;
  readonly upload_bytes: number;
}

export interface Lineage {
  readonly parent: string | null;
  readonly recipe: readonly string[];
  readonly metrics: Readonly<Record<string, number>>;
}

export interface PrivacyPolicy {
  readonly modes: readonly ("secure" | "plain")[];
  readonly min_cohort: number;
  readonly threshold: number;
  readonly max_clip: number;
  readonly max_bits: number;
  readonly colluders: number;
  readonly min_contributors: number;
  readonly queries: number;
  readonly query_days: number;
  readonly max_value: number;
  readonly max_server_lr: number;
  readonly weighting: "examples" | "uniform";
  readonly protocols: readonly ("complete" | "neighbours" | "neighbours-mlkem")[];
  readonly dropouts: number;
  readonly server: "malicious" | "semi-honest";
  readonly noise_multiplier: number;
  readonly aggregators: Aggregators | null;
}

/** Bounds of rounds among edge servers. */
export interface Aggregators {
  readonly min_site_cohort: number;
  readonly max_site_cohort: number;
  readonly min_cohort: number;
  readonly threshold: number;
  readonly colluders: number;
  readonly levels: number;
}

/** Everything about a bundle but the bytes. `files` maps every other file to its SHA-256 (hex). */
export interface Manifest {
  readonly format: number;
  readonly name: string;
  readonly programs: Readonly<Record<string, Program>>;
  readonly parameters: readonly TensorSpec[];
  readonly limits: Limits;
  readonly privacy: PrivacyPolicy;
  readonly files: Readonly<Record<string, string>>;
  readonly schedule: readonly Phase[];
  readonly self_test: SelfTest | null;
  readonly statistics: readonly Statistic[];
  readonly strategy: string;
  readonly lineage: Lineage;
  /** What is below the greatest one of a publisher's model is not to be used in rounds any more. */
  readonly sequence: number;
  /** Until when devices take part in rounds with it, in Unix seconds; 0: without end. */
  readonly not_after: number;
  /** Whose devices may use it; none: anybody's. */
  readonly populations: readonly string[];
  /** The file of the model as it was converted, for export; no device runs it. */
  readonly source: string;
}

const NO_LINEAGE: Lineage = { parent: null, recipe: [], metrics: {} };

const decoder = struct<Manifest>({
  format: required(integer),
  name: required(text),
  programs: required(dictionary(programDecoder)),
  parameters: required(
    list(
      struct<TensorSpec>({
        name: required(text),
        dtype: required(oneOf(...DTYPES)),
        shape: required(list(integer)),
        sha256: required(text),
      }),
    ),
  ),
  limits: required(
    struct<Limits>({
      peak_bytes: required(integer),
      flops_per_example: required(integer),
      upload_bytes: required(integer),
    }),
  ),
  privacy: required(
    struct<PrivacyPolicy>({
      modes: required(list(oneOf("secure", "plain"))),
      min_cohort: required(integer),
      threshold: required(float),
      max_clip: required(float),
      max_bits: required(integer),
      colluders: optional(float, 1 / 3),
      min_contributors: optional(integer, 20, "20"),
      queries: optional(integer, 30, "30"),
      query_days: optional(integer, 30, "30"),
      max_value: optional(float, 1e6),
      max_server_lr: optional(float, 1),
      weighting: optional(oneOf("examples", "uniform"), "examples", '"examples"'),
      protocols: optional(list(oneOf("complete", "neighbours", "neighbours-mlkem")), ["complete"], '["complete"]'),
      dropouts: optional(float, 0.2),
      server: optional(oneOf("malicious", "semi-honest"), "malicious", '"malicious"'),
      noise_multiplier: optional(float, 0),
      aggregators: optional(
        nullable(
          struct<Aggregators>({
            min_site_cohort: required(integer),
            max_site_cohort: required(integer),
            min_cohort: optional(integer, 2, "2"),
            threshold: optional(float, 0.6),
            colluders: optional(float, 0),
            levels: optional(integer, 1, "1"),
          }),
        ),
        null,
        "null",
      ),
    }),
  ),
  files: required(dictionary(text)),
  schedule: optional(
    list(
      struct<Phase>({
        program: required(text),
        batch_size: required(integer),
        epochs: optional(nullable(integer), null, "null"),
        steps: optional(nullable(integer), null, "null"),
        moves: optional(nullable(list(text)), null, "null"),
      }),
    ),
    [],
    "[]",
  ),
  self_test: optional(
    nullable(
      struct<SelfTest>({
        file: required(text),
        rtol: required(float),
        atol: required(float),
        source: optional(oneOf("", "drawn", "given"), "", '""'),
      }),
    ),
    null,
    "null",
  ),
  statistics: optional(list(statistic), [], "[]"),
  strategy: optional(text, "", '""'),
  // No text to leave out: the writer spells an empty lineage as {}.
  lineage: optional(
    struct<Lineage>({
      parent: optional(nullable(text), null, "null"),
      recipe: optional(list(text), [], "[]"),
      metrics: optional(dictionary(float), {}, "{}"),
    }),
    NO_LINEAGE,
  ),
  sequence: optional(integer, 0, "0"),
  not_after: optional(integer, 0, "0"),
  populations: optional(list(text), [], "[]"),
  source: optional(text, "", '""'),
});

/** Decode and validate. Raises the ManifestError that says what is wrong, and where. */
export function decodeManifest(data: Uint8Array): Manifest {
  if (data.length > MAX_MANIFEST_BYTES) {
    throw new ManifestError(`manifest: ${data.length} bytes, the limit is ${MAX_MANIFEST_BYTES}`);
  }
  try {
    const node = parseJson(data);
    const format = node.type === "object" ? node.members.get("format") : undefined;
    if (format === undefined) throw new DecodeError('field "format" is missing', "");
    const version = integer(format, "format").value;
    if (version !== FORMAT_VERSION) {
      throw new UnknownVersionError(
        `manifest: format ${version}, this library reads format ${FORMAT_VERSION}; update archipel-web`,
      );
    }
    const { value, text: canonical } = decoder(node, "");
    validateManifest(value);
    if (!equal(new TextEncoder().encode(canonical), data)) {
      throw new ManifestError("manifest: not canonical JSON (sorted keys, no white space, defaults left out)");
    }
    return value;
  } catch (error) {
    if (error instanceof RoleDecodeError) throw new UnknownRoleError(`manifest: ${error.message}`);
    if (error instanceof DecodeError || error instanceof JsonSyntaxError) {
      throw new ManifestError(`manifest: ${error.message}`);
    }
    throw error;
  }
}

function equal(first: Uint8Array, second: Uint8Array): boolean {
  return first.length === second.length && first.every((byte, index) => byte === second[index]);
}
