/** What the devices of a secure round tell each other through the server (archipel/protocol/messages/secure.py). */

import { type Decoder, optional, required, struct } from "../../bundle/decoders.js";
import type { Bytes } from "../bytes.js";
import { bytes, digestText, id, key, KEY_PATH_BYTES, listOf, MAX_COHORT, signature } from "./fields.js";
import { type Chain, chain, type Sealed, sealed } from "./identity.js";

/** Label "advertisement", sealed by the device key: X25519 public keys for this round only. */
export interface Advertisement {
  readonly round_id: string;
  readonly plan: string;
  readonly cipher_key: Bytes;
  readonly mask_key: Bytes;
  /** The Merkle root of the keys for the envelopes that the device receives, one for each possible sender. */
  readonly envelope_root: Bytes;
}

export const advertisement: Decoder<Advertisement> = struct<Advertisement>({
  round_id: required(id),
  plan: required(digestText),
  cipher_key: required(key),
  mask_key: required(key),
  envelope_root: required(key),
});

export interface AdvertiseRequest {
  readonly advertisement: Sealed;
  readonly envelope_keys: Bytes;
}

export interface Member {
  readonly chain: Chain;
  readonly advertisement: Sealed;
}

/** The key to which the reader seals its envelope for `peer`; `path` leads from it to the peer's root. */
export interface EnvelopeKey {
  readonly peer: string;
  readonly key: Bytes;
  readonly path: Bytes;
}

/** U1: everybody who advertised keys. `keys` are for the reader, one of each other member. */
export interface Cohort {
  readonly members: readonly Member[];
  readonly keys: readonly EnvelopeKey[];
}

export const cohort: Decoder<Cohort> = struct<Cohort>({
  members: required(listOf(struct<Member>({ chain: required(chain), advertisement: required(sealed) }), MAX_COHORT)),
  keys: optional(
    listOf(
      struct<EnvelopeKey>({ peer: required(id), key: required(key), path: required(bytes(KEY_PATH_BYTES)) }),
      MAX_COHORT,
    ),
    [],
  ),
});

/** An envelope. `peer` is the recipient in a request, the sender in an inbox. */
export interface EncryptedShare {
  readonly peer: string;
  readonly ciphertext: Bytes;
  readonly signature: Bytes;
}

export interface Shares {
  readonly shares: readonly EncryptedShare[];
}

export const shares: Decoder<Shares> = struct<Shares>({
  shares: required(
    listOf(
      struct<EncryptedShare>({
        peer: required(id),
        ciphertext: required(bytes(512)),
        signature: required(signature),
      }),
      MAX_COHORT,
    ),
  ),
});

/** A proof that `accused` signed an envelope for `complainer` that has no shares in it. */
export interface Complaint {
  readonly complainer: string;
  readonly accused: string;
  readonly ciphertext: Bytes;
  readonly signature: Bytes;
  readonly key: Bytes;
  readonly path: Bytes;
}

export interface Complaints {
  readonly complaints: readonly Complaint[];
}

export const complaints: Decoder<Complaints> = struct<Complaints>({
  complaints: required(
    listOf(
      struct<Complaint>({
        complainer: required(id),
        accused: required(id),
        ciphertext: required(bytes(512)),
        signature: required(signature),
        key: required(key),
        path: required(bytes(KEY_PATH_BYTES)),
      }),
      MAX_COHORT,
    ),
  ),
});

/** U3: the devices whose masked updates are in the sum, sorted. */
export interface Survivors {
  readonly devices: readonly string[];
}

export const survivors: Decoder<Survivors> = struct<Survivors>({ devices: required(listOf(id, MAX_COHORT)) });

/** Label "confirmation", sealed by the device key: "The server showed me these survivors". */
export interface Confirmation {
  readonly round_id: string;
  readonly plan: string;
  readonly cohort: string;
  readonly complaints: string;
  readonly survivors: string;
}

export const confirmation: Decoder<Confirmation> = struct<Confirmation>({
  round_id: required(id),
  plan: required(digestText),
  cohort: required(digestText),
  complaints: required(digestText),
  survivors: required(digestText),
});

export interface Confirmed {
  readonly device: string;
  readonly confirmation: Sealed;
}

export interface Confirmations {
  readonly confirmations: readonly Confirmed[];
}

export const confirmations: Decoder<Confirmations> = struct<Confirmations>({
  confirmations: required(
    listOf(struct<Confirmed>({ device: required(id), confirmation: required(sealed) }), MAX_COHORT),
  ),
});

export interface RevealedShare {
  readonly device: string;
  readonly share: Bytes;
}

/** For each survivor the share of its self-mask seed, for each dropped device that of its mask key; never both. */
export interface Unmasking {
  readonly self_seeds: readonly RevealedShare[];
  readonly mask_keys: readonly RevealedShare[];
}
