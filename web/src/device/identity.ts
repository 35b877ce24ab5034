/** Who a device is: a chain of certificates that every peer can check (archipel/protocol/identity.py). */

import { hex } from "../bundle/digests.js";
import { concat, label, sameBytes } from "./bytes.js";
import { digest, type SigningKey, signingKeyOf } from "./crypto.js";
import { CertificateError } from "./errors.js";
import { decode, MAX_ROTATIONS } from "./messages/fields.js";
import {
  type Chain,
  type EnrolmentToken,
  identityCertificate,
  MAX_STATEMENT_BYTES,
  rotationCertificate,
  type Sealed,
  tokenCertificate,
} from "./messages/identity.js";
import { bodyDigest, seal, unseal } from "./sealed.js";

/** What a verified chain proves. `deviceKey` is the raw public key at its end. */
export interface VerifiedDevice {
  readonly deviceId: string;
  readonly deviceKey: Uint8Array;
  readonly tokenKey: Uint8Array;
  readonly population: string;
  readonly kind: "device" | "aggregator";
  readonly rotations: number;
}

/** 32 hexadecimal digits of the device's first key. */
export async function deviceIdOf(deviceKey: Uint8Array): Promise<string> {
  return hex(await digest(concat(label("device"), deviceKey))).slice(0, 32);
}

export async function tokenIdOf(tokenKey: Uint8Array): Promise<string> {
  return hex(await digest(concat(label("token-id"), tokenKey))).slice(0, 32);
}

export interface Expected {
  /** The population that the device must be of. */
  readonly population?: string;
  /** Unix seconds: the token must not have expired by then. */
  readonly now?: number;
}

/** Raises CertificateError where a link does not verify, MessageError where there are no certificates. */
export async function verifyChain(
  chain: Chain,
  enrolmentKey: Uint8Array,
  { population, now }: Expected = {},
): Promise<VerifiedDevice> {
  const limit = MAX_STATEMENT_BYTES;
  // Each link is verified with the key that the one before has proved; nothing is read before that.
  const token = await unseal("token", chain.token, enrolmentKey, tokenCertificate, limit);
  const identity = await unseal("identity", chain.identity, token.token_key, identityCertificate, limit);
  const deviceId = await deviceIdOf(identity.device_key);
  const keys = [identity.device_key];
  const rotations = chain.rotations ?? [];
  for (const [index, sealed] of rotations.entries()) {
    const number = index + 1;
    const rotation = await unseal("rotation", sealed, keys[index] as Uint8Array, rotationCertificate, limit);
    if (rotation.device !== deviceId || rotation.number !== number) {
      throw new CertificateError(
        `device ${deviceId}: expected its rotation ${number}, got rotation ${rotation.number} of ${rotation.device}`,
      );
    }
    // A key is often replaced because somebody else may have it, so it must not become valid again.
    if (keys.some((key) => sameBytes(key, rotation.device_key))) {
      throw new CertificateError(`device ${deviceId}: rotation ${number} goes back to a key that it has had before`);
    }
    keys.push(rotation.device_key);
  }
  if (population !== undefined && token.population !== population) {
    throw new CertificateError(`device ${deviceId}: enrolled in ${token.population}, not in ${population}`);
  }
  if (now !== undefined && now > token.not_after) {
    throw new CertificateError(
      `device ${deviceId}: its enrolment token expired at ${token.not_after}, it is ${Math.floor(now)}; ` +
        "ask for a new token",
    );
  }
  const { kind, token_key: tokenKey } = token;
  const deviceKey = keys.at(-1) as Uint8Array;
  return { deviceId, deviceKey, tokenKey, population: token.population, kind, rotations: rotations.length };
}

/** The device id of a chain that the caller has verified before. */
export async function readDeviceId(chain: Chain): Promise<string> {
  return deviceIdOf(decode("identity", chain.identity.body, identityCertificate).device_key);
}

/** `certificate` is signed by the old key, `proof` by the new one: both are the device's. */
export interface RotationRequest {
  readonly certificate: Sealed;
  readonly proof: Sealed;
}

/** Raises CertificateError where the key was replaced as often as it may be. */
export function checkRotations(chain: Chain): void {
  if ((chain.rotations?.length ?? 0) < MAX_ROTATIONS) return;
  throw new CertificateError(
    `the key was replaced ${MAX_ROTATIONS} times, which is as often as it can be; erase the device, and enrol it ` +
      "again with a new token",
  );
}

/** The request with which a device replaces the key at the end of its chain; always the same bytes. */
export async function rotationRequest(
  chain: Chain,
  old: SigningKey,
  next: SigningKey,
  serverKey: Uint8Array,
): Promise<RotationRequest> {
  checkRotations(chain);
  const number = (chain.rotations?.length ?? 0) + 1;
  const device = await readDeviceId(chain);
  const certificate = await seal("rotation", { device, number, device_key: next.publicKey }, old);
  // Signed by the new key: the old one alone could name a key whose private half the device does not have.
  const proof = await seal("rotated", { server_key: serverKey, certificate: await bodyDigest(certificate) }, next);
  return { certificate, proof };
}

export interface EnrolmentRequest {
  readonly chain: Chain;
  readonly proof: Sealed;
}

/** The request with which a device enrols. Raises CertificateError where the token contradicts itself. */
export async function enrolmentRequest(token: EnrolmentToken, key: SigningKey): Promise<EnrolmentRequest> {
  const certificate = await unseal("token", token.certificate, token.enrolment_key, tokenCertificate);
  const tokenKey = await signingKeyOf(token.seed);
  if (!sameBytes(certificate.token_key, tokenKey.publicKey)) {
    throw new CertificateError("enrolment token: its certificate is for another token's key; ask for a new token");
  }
  // Only the certificate is signed, and it is what the server and the peers read.
  if (certificate.population !== token.population) {
    throw new CertificateError(
      `enrolment token: certified for population ${certificate.population}, but says ${token.population}`,
    );
  }
  const identity = await seal("identity", { device_key: key.publicKey }, tokenKey);
  const proof = await seal("enrol", { server_key: token.server_key }, key);
  return { chain: { token: token.certificate, identity }, proof };
}
