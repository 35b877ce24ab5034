/** Who a device is: certificates, enrolment and sessions (archipel/protocol/messages/identity.py). */

import { type Decoder, float, nullable, oneOf, optional, required, struct } from "../../bundle/decoders.js";
import type { Bytes } from "../bytes.js";
import { bearerToken, bytes, id, key, listOf, MAX_ROTATIONS, name, short, whole } from "./fields.js";

/** `body` is the JSON of one message; `signature` is over "archipel/v1/LABEL", a zero byte and the body. */
export interface Sealed {
  readonly body: Bytes;
  readonly signature: Bytes;
}

/** The most bytes of a sealed body; `unseal` may ask for less. */
export const MAX_BODY_BYTES = 1 << 20;
/** For statements that the server sends on to every peer. */
export const MAX_STATEMENT_BYTES = 1024;

export const sealed: Decoder<Sealed> = struct<Sealed>({
  body: required(bytes(2 * MAX_BODY_BYTES)),
  // Of any length: one that is not 64 does not verify, which is another error than a message that is none.
  signature: required(bytes(1024)),
});

export interface TokenCertificate {
  readonly kind: "device" | "aggregator";
  readonly token_key: Bytes;
  readonly population: string;
  readonly not_after: number;
}

export const tokenCertificate: Decoder<TokenCertificate> = struct<TokenCertificate>({
  kind: required(oneOf("device", "aggregator")),
  token_key: required(key),
  population: required(name),
  not_after: required(whole(0)),
});

export const identityCertificate = struct<{ device_key: Bytes }>({ device_key: required(key) });

export interface RotationCertificate {
  readonly device: string;
  readonly number: number;
  readonly device_key: Bytes;
}

export const rotationCertificate: Decoder<RotationCertificate> = struct<RotationCertificate>({
  device: required(id),
  number: required(whole(1, MAX_ROTATIONS)),
  device_key: required(key),
});

/** Enrolment key -> token -> device's first key -> its next keys; every peer checks it. */
export interface Chain {
  readonly token: Sealed;
  readonly identity: Sealed;
  /** Left out of the JSON where there are none. */
  readonly rotations?: readonly Sealed[];
}

export const chain: Decoder<Chain> = struct<{ token: Sealed; identity: Sealed; rotations: readonly Sealed[] }>({
  token: required(sealed),
  identity: required(sealed),
  rotations: optional(listOf(sealed, MAX_ROTATIONS), []),
});

/**
 * The server at the top of a tree of servers: its key, which signs the weights log, the key that certifies its members,
 * and the population in which these enrol.
 */
export interface Root {
  readonly server_key: Bytes;
  readonly enrolment_key: Bytes;
  readonly population: string;
}

const root: Decoder<Root> = struct<Root>({
  server_key: required(key),
  enrolment_key: required(key),
  population: required(name),
});

/**
 * The token file that an owner gets. `seed` is the token's private half, with which one device can enrol. `root` is
 * there where the server is an edge server.
 */
export interface EnrolmentToken {
  readonly server: string;
  readonly server_key: Bytes;
  readonly enrolment_key: Bytes;
  readonly publisher_keys: readonly Bytes[];
  readonly population: string;
  readonly seed: Bytes;
  readonly certificate: Sealed;
  readonly root: Root | null;
}

export const enrolmentToken: Decoder<EnrolmentToken> = struct<EnrolmentToken>({
  server: required(short(2048)),
  server_key: required(key),
  enrolment_key: required(key),
  publisher_keys: required(listOf(key, 64)),
  population: required(name),
  seed: required(bytes(32, 32)),
  certificate: required(sealed),
  root: optional(nullable(root), null),
});

export const enrolmentResponse = struct<{ device_id: string }>({ device_id: required(id) });

export const rotationResponse = struct<{ device_id: string; rotations: number }>({
  device_id: required(id),
  rotations: required(whole(1, MAX_ROTATIONS)),
});

export const challenge = struct<{ nonce: Bytes; expires: number }>({
  nonce: required(bytes(32, 32)),
  expires: required(float),
});

export const sessionResponse = struct<{ token: string; expires: number }>({
  token: required(bearerToken),
  expires: required(float),
});

export interface Revocations {
  readonly population: string;
  readonly epoch: number;
  readonly devices: readonly string[];
  readonly tokens: readonly string[];
}

