/**
 * Where weights come from: the server's log, and the confirmations of devices
 * (archipel/protocol/messages/weights_log.py).
 */

import { type Decoder, dictionary, float, nullable, oneOf, optional, required, struct } from "../../bundle/decoders.js";
import type { Bytes } from "../bytes.js";
import { bytes, digestText, entriesOf, id, listOf, MAX_COHORT, name, signature, whole } from "./fields.js";
import { type Chain, chain, type Sealed, sealed } from "./identity.js";
import { type Survivors, survivors } from "./secure.js";

const MAX_ENTRIES = 256;

/** Label "weights", sealed by the server key: one entry of the log of a bundle in a population. */
export interface WeightsStatement {
  readonly population: string;
  readonly bundle: string;
  readonly number: number;
  readonly previous: string;
  readonly kind: "start" | "step" | "rollback";
  readonly weights: string;
  readonly task_id: string | null;
  readonly parent: string | null;
  readonly round_id: string | null;
  readonly plan: string | null;
  readonly privacy: "secure" | "plain";
  readonly sum: string | null;
  readonly devices: number;
  /** How many devices are below the edge servers in it; 0: its members are devices. */
  readonly leaves: number;
  readonly hyperparameters: Readonly<Record<string, number>>;
}

export const weightsStatement: Decoder<WeightsStatement> = struct<WeightsStatement>({
  population: required(name),
  bundle: required(digestText),
  number: required(whole(1)),
  previous: required(digestText),
  kind: required(oneOf("start", "step", "rollback")),
  weights: required(digestText),
  task_id: optional(nullable(id), null),
  parent: optional(nullable(digestText), null),
  round_id: optional(nullable(id), null),
  plan: optional(nullable(digestText), null),
  privacy: optional(oneOf("secure", "plain"), "secure"),
  sum: optional(nullable(digestText), null),
  devices: optional(whole(0, MAX_COHORT), 0),
  leaves: optional(whole(0), 0),
  hyperparameters: optional(entriesOf(dictionary(float), 64), {}),
});

export interface WeightsLog {
  readonly entries: readonly Sealed[];
  readonly newest: number;
}

export const weightsLog: Decoder<WeightsLog> = struct<WeightsLog>({
  entries: required(listOf(sealed, MAX_ENTRIES)),
  newest: required(whole(0)),
});

/** The evidence of a secure round: its plan, its survivors, what they signed, and their signatures. */
export interface Endorsement {
  readonly plan: Sealed;
  readonly survivors: Survivors;
  readonly confirmation: Bytes;
  readonly endorsers: readonly { readonly chain: Chain; readonly signature: Bytes }[];
}

export const endorsement: Decoder<Endorsement> = struct<Endorsement>({
  plan: required(sealed),
  survivors: required(survivors),
  confirmation: required(bytes(1024)),
  endorsers: required(
    listOf(
      struct<Endorsement["endorsers"][number]>({ chain: required(chain), signature: required(signature) }),
      MAX_COHORT,
    ),
  ),
});
