/** U1, the devices that advertised keys for a round (archipel/protocol/secagg/cohort.py). */

import { hex } from "../../bundle/digests.js";
import { concat, label, sameBytes, unhex } from "../bytes.js";
import { digest } from "../crypto.js";
import { ConsistencyError, SecureAggregationError } from "../errors.js";
import { readDeviceId, type VerifiedDevice, verifyChain } from "../identity.js";
import { MAX_STATEMENT_BYTES, type Sealed } from "../messages/identity.js";
import { type Advertisement, advertisement, type Cohort } from "../messages/secure.js";
import { requireMember, type Revoked } from "../revocations.js";
import { unseal } from "../sealed.js";
import { isSmallOrder } from "./keys.js";
import type { Peer, Session } from "./session.js";

/**
 * Peers by device id, in sorted order, once every chain and every advertisement is verified.
 *
 * All members must be of the population and kind of `own`, and none may be revoked. No device, token, device key or
 * round key may occur twice, so that one device cannot count as many.
 *
 * Raises CertificateError, MessageError, SecureAggregationError or ConsistencyError.
 */
export async function verifyCohort(
  cohort: Cohort,
  own: VerifiedDevice,
  enrolmentKey: Uint8Array,
  roundId: string,
  planDigest: string,
  revoked: Revoked,
): Promise<Map<string, Peer>> {
  const members = new Map<string, { deviceKey: Uint8Array; keys: Advertisement }>();
  const tokens = new Set<string>();
  for (const member of cohort.members) {
    // The chain first: only then is its key one that the advertisement can be verified with.
    const device = await verifyChain(member.chain, enrolmentKey, { population: own.population });
    await requireMember(revoked, device);
    if (device.kind !== own.kind) {
      throw new ConsistencyError(`cohort: ${device.deviceId} is a ${device.kind}, this participant a ${own.kind}`);
    }
    requireNew(tokens, hex(device.tokenKey), () => `${device.deviceId} shares its enrolment token with another member`);
    const keys = await checkAdvertisement(member.advertisement, device.deviceKey, roundId, planDigest);
    if (members.has(device.deviceId)) throw new ConsistencyError(`cohort: ${device.deviceId} is in it twice`);
    members.set(device.deviceId, { deviceKey: device.deviceKey, keys });
  }
  const [roundKeys, deviceKeys] = [new Set<string>(), new Set<string>()];
  for (const { deviceKey, keys } of members.values()) {
    // All keys of the round in one set: nobody's cipher key may be another's mask key, which the server may
    // reconstruct.
    for (const key of [keys.cipher_key, keys.mask_key]) {
      requireNew(roundKeys, hex(key), (text) => `round key ${text}... occurs twice`);
    }
    requireNew(deviceKeys, hex(deviceKey), (text) => `device key ${text}... occurs twice`);
  }
  // Places follow the sorted ids, so that every member and the server number the cohort alike.
  return new Map(
    [...members.keys()].sort().map((deviceId, place) => {
      const { deviceKey, keys } = members.get(deviceId) as { deviceKey: Uint8Array; keys: Advertisement };
      const { cipher_key: cipherKey, mask_key: maskKey, envelope_root: envelopeRoot } = keys;
      return [deviceId, { deviceId, deviceKey, cipherKey, maskKey, envelopeRoot, place }];
    }),
  );
}

/** The advertisement, verified. Raises CertificateError, MessageError or SecureAggregationError. */
export async function checkAdvertisement(
  sealed: Sealed,
  deviceKey: Uint8Array,
  roundId: string,
  planDigest: string,
): Promise<Advertisement> {
  const found = await unseal("advertisement", sealed, deviceKey, advertisement, MAX_STATEMENT_BYTES);
  if (found.round_id !== roundId || found.plan !== planDigest) {
    throw new SecureAggregationError(
      `advertisement: expected round ${roundId} and plan ${planDigest.slice(0, 16)}..., ` +
        `got round ${found.round_id} and plan ${found.plan.slice(0, 16)}...`,
    );
  }
  // When a device drops out, the server reconstructs its mask key. Were that also its cipher key, the server could open
  // the device's envelopes, take the seed's shares from them and unmask the device's vector.
  if (sameBytes(found.cipher_key, found.mask_key)) {
    throw new SecureAggregationError("advertisement: the cipher key and the mask key must differ");
  }
  for (const name of ["cipher_key", "mask_key"] as const) {
    if (isSmallOrder(found[name])) {
      throw new SecureAggregationError(`advertisement: its ${name} is an X25519 public key of small order`);
    }
  }
  return found;
}

/**
 * The key that each other member has for the envelope from `own`, by device id. Raises ConsistencyError unless there is
 * one key of each member, under the root that this member advertised.
 */
export async function readEnvelopeKeys(
  cohort: Cohort,
  own: string,
  session: Session,
): Promise<Map<string, Uint8Array>> {
  const keys = new Map<string, Uint8Array>();
  for (const { peer, key, path } of cohort.keys) {
    if (peer === own || !session.peers.has(peer) || keys.has(peer)) {
      throw new ConsistencyError(`cohort: an envelope key of ${peer}, expected one of each other member`);
    }
    if (!(await session.isKeyFor(own, peer, key, path))) {
      throw new ConsistencyError(`cohort: the envelope key of ${peer} is not the one that it advertised`);
    }
    keys.set(peer, key);
  }
  const missing = [...session.peers.keys()].filter((peer) => peer !== own && !keys.has(peer));
  if (missing.length) throw new ConsistencyError(`cohort: no envelope key of ${missing.slice(0, 3).join(", ")}`);
  return keys;
}

/** SHA-256 (hex) over the sorted device ids and advertisements. It names this one session of the round. */
export async function cohortDigest(cohort: Cohort): Promise<string> {
  const rows: string[] = [];
  for (const member of cohort.members) {
    rows.push((await readDeviceId(member.chain)) + hex(await digest(member.advertisement.body)));
  }
  return hex(await digest(concat(label("cohort"), unhex(rows.sort().join("")))));
}

function requireNew(seen: Set<string>, key: string, what: (start: string) => string): void {
  if (seen.has(key)) throw new ConsistencyError(`cohort: ${what(key.slice(0, 16))}`);
  seen.add(key);
}
