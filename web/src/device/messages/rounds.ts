/** From a check-in to a round: plans, who is revoked, and how a round stands (archipel/protocol/messages/rounds.py). */

import {
  bool, type Decoder, dictionary, float, nullable, oneOf, optional, required, struct,
} from "../../bundle/decoders.js";
import { MAX_LEVELS, MAX_SITE } from "../../bundle/validation.js";
import {
  digestText, entriesOf, id, listOf, MAX_COHORT, MAX_MODELS, MAX_PARTS, MAX_REVOKED, name, real, short, whole,
} from "./fields.js";
import { type Revocations, type Sealed, sealed } from "./identity.js";

export const PHASES = [
  "assigning", "advertising", "sharing", "complaining", "masking", "confirming", "unmasking", "buffering", "updating",
  "aggregating", "committed", "failed",
] as const;
export type Phase = (typeof PHASES)[number];
export type Kind = "training" | "evaluation" | "analytics";

/** What a distribution's bins are; read, so that such a plan is refused for its kind and not for its form. */
export interface Bins {
  readonly low: number;
  readonly high: number;
  readonly count: number;
  readonly scale: "linear" | "log";
  readonly better: "higher" | "lower";
}

const bins: Decoder<Bins> = struct<Bins>({
  low: required(float),
  high: required(float),
  count: optional(whole(1, 100), 20),
  scale: optional(oneOf("linear", "log"), "linear"),
  better: optional(oneOf("higher", "lower"), "higher"),
});

/** What the server says of noise of its own; nobody can check it. */
export interface ServerNoise {
  readonly mechanism: "central" | "correlated";
  readonly multiplier: number;
  readonly epsilon: number;
  readonly delta: number;
}

const serverNoise: Decoder<ServerNoise> = struct<ServerNoise>({
  mechanism: required(oneOf("central", "correlated")),
  multiplier: required(real(Number.MIN_VALUE, 1e9)),
  epsilon: required(real(0, 1e30)),
  delta: required(real(Number.MIN_VALUE, 1)),
});

/** What devices add to their changes themselves; read, so that such a plan is refused by name and not for its form. */
export interface NoiseShare {
  readonly deviation: number;
  readonly steps: number;
}

const noiseShare: Decoder<NoiseShare> = struct<NoiseShare>({
  deviation: required(whole(1, 2 ** 24)),
  steps: required(whole(1, 2 ** 24)),
});

/** Label "plan", sealed by the server key: what a round is. The fields are those of the Python package. */
export interface RoundPlan {
  readonly round_id: string;
  readonly task_id: string;
  readonly number: number;
  readonly bundle: string;
  readonly weights: string;
  readonly privacy: "secure" | "plain";
  readonly min_cohort: number;
  readonly max_cohort: number;
  readonly threshold: number;
  readonly modulus_bits: number;
  readonly hyperparameters: Readonly<Record<string, number>>;
  readonly broadcast: string | null;
  readonly kind: Kind;
  readonly program: string;
  readonly metrics: Readonly<Record<string, number>>;
  readonly max_examples: number;
  readonly staleness_exponent: number | null;
  readonly buffered: boolean;
  readonly colluders: number;
  readonly min_contributors: number;
  readonly count_adoption: boolean;
  readonly distributions: Readonly<Record<string, Bins>>;
  readonly narrow: boolean;
  readonly serial: number;
  readonly not_after: number;
  readonly revocations: string | null;
  readonly server_noise: ServerNoise | null;
  readonly protocol: "complete" | "neighbours" | "neighbours-mlkem";
  readonly neighbours: number;
  readonly partners: number;
  readonly noise: NoiseShare | null;
  /** How many levels of edge servers are below the server that made the plan; its members are devices if none is. */
  readonly levels: number;
  /** Of how many devices a member sends the sum, at most. */
  readonly site: number;
  /** The root's plan as the root sealed it, in a plan of an edge server. */
  readonly origin: Sealed | null;
}

export const roundPlan: Decoder<RoundPlan> = struct<RoundPlan>({
  round_id: required(id),
  task_id: required(id),
  number: required(whole(0)),
  bundle: required(digestText),
  weights: required(digestText),
  privacy: required(oneOf("secure", "plain")),
  min_cohort: required(whole(1, MAX_COHORT)),
  max_cohort: required(whole(1, MAX_COHORT)),
  threshold: required(whole(1, MAX_COHORT)),
  modulus_bits: required(whole(8, 32)),
  hyperparameters: optional(dictionary(float), {}),
  broadcast: optional(nullable(digestText), null),
  kind: optional(oneOf("training", "evaluation", "analytics"), "training"),
  program: optional(short(128), ""),
  metrics: optional(entriesOf(dictionary(real(Number.MIN_VALUE, 1e30)), 64), {}),
  max_examples: optional(whole(1, 2 ** 30), 1000),
  staleness_exponent: optional(nullable(real(0, 16)), null),
  buffered: optional(bool, false),
  colluders: optional(whole(0, MAX_COHORT - 1), 0),
  min_contributors: optional(whole(0, MAX_COHORT), 0),
  count_adoption: optional(bool, false),
  distributions: optional(entriesOf(dictionary(bins), 16), {}),
  narrow: optional(bool, false),
  serial: optional(whole(0), 0),
  not_after: optional(whole(0), 0),
  revocations: optional(nullable(digestText), null),
  server_noise: optional(nullable(serverNoise), null),
  protocol: optional(oneOf("complete", "neighbours", "neighbours-mlkem"), "complete"),
  neighbours: optional(whole(0, MAX_COHORT - 1), 0),
  partners: optional(whole(0, MAX_COHORT - 1), 0),
  noise: optional(nullable(noiseShare), null),
  levels: optional(whole(0, MAX_LEVELS), 0),
  site: optional(whole(1, MAX_SITE), 1),
  origin: optional(nullable(sealed), null),
});

export const revocations: Decoder<Revocations> = struct<Revocations>({
  population: required(name),
  epoch: required(whole(0)),
  devices: required(listOf(id, MAX_REVOKED)),
  tokens: required(listOf(id, MAX_REVOKED)),
});

export type LeaveReason =
  | "cohort" | "kind" | "pace" | "population" | "privacy" | "publisher" | "size" | "policy" | "bundle" | "data"
  | "diverged" | "other";

export interface SetAside {
  readonly until: number;
  readonly reason: string;
}

export interface CheckInResponse {
  readonly plan: Sealed | null;
  readonly retry_after: number;
  readonly set_aside: SetAside | null;
  readonly offers: readonly Sealed[];
}

export const checkInResponse: Decoder<CheckInResponse> = struct<CheckInResponse>({
  plan: optional(nullable(sealed), null),
  retry_after: optional(float, 1),
  set_aside: optional(nullable(struct<SetAside>({ until: required(float), reason: required(short(1024)) })), null),
  offers: optional(listOf(sealed, MAX_MODELS), []),
});

export interface RoundStatus {
  readonly round_id: string;
  readonly phase: Phase;
  readonly phase_ends: number;
  readonly retry_after: number;
  readonly reason: string;
  readonly staleness: number;
  readonly complaints: number;
}

export const roundStatus: Decoder<RoundStatus> = struct<RoundStatus>({
  round_id: required(id),
  phase: required(oneOf(...PHASES)),
  phase_ends: required(float),
  retry_after: required(float),
  reason: optional(short(1 << 16), ""),
  staleness: optional(whole(0), 0),
  complaints: optional(whole(0, MAX_COHORT), 0),
});

export const receipt = struct<{ stored: boolean }>({ stored: optional(bool, true) });

/** The numbers of the parts of an update that the server has; the first is part 1. */
export const updateParts = struct<{ held: readonly number[] }>({
  held: optional(listOf(whole(1, MAX_PARTS), MAX_PARTS), []),
});

export interface Problem {
  readonly type: string;
  readonly title: string;
  readonly status: number;
  readonly detail: string;
  readonly request_id: string;
  readonly errors: readonly FieldProblem[];
}

export interface FieldProblem {
  readonly detail: string;
  readonly pointer: string;
  readonly parameter: string;
}

export const problem: Decoder<Problem> = struct<Problem>({
  type: required(short(1024)),
  title: required(short(1024)),
  status: required(whole(400, 599)),
  detail: required(short(1 << 16)),
  request_id: required(short(1024)),
  errors: optional(
    listOf(
      struct<FieldProblem>({
        detail: required(short(1 << 16)),
        pointer: optional(short(1 << 16), ""),
        parameter: optional(short(1024), ""),
      }),
      256,
    ),
    [],
  ),
});
