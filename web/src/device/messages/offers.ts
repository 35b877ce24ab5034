/** The versions of models that a server offers (archipel/protocol/messages/rounds.py). */

import { type Decoder, nullable, optional, required, struct } from "../../bundle/decoders.js";
import { digestText, id, name, whole } from "./fields.js";

const MAX_VERSION = 1_000_000_000;

/**
 * Label "offer", sealed by the server key: the version of `model` that devices of `population` are to run.
 *
 * `weights` is the digest of its parameters (safetensors), null for those in the bundle. `rollout` is there while a
 * rollout offers the version to a part of the devices. A device that has seen a greater `serial` knows that this offer
 * is old.
 */
export interface Offer {
  readonly population: string;
  readonly model: string;
  readonly version: number;
  readonly bundle: string;
  readonly weights: string | null;
  readonly rollout: string | null;
  readonly serial: number;
}

export const offer: Decoder<Offer> = struct<Offer>({
  population: required(name),
  model: required(name),
  version: required(whole(1, MAX_VERSION)),
  bundle: required(digestText),
  weights: optional(nullable(digestText), null),
  rollout: optional(nullable(id), null),
  serial: required(whole(0)),
});
