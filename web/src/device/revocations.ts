/**
 * The list of revoked devices and tokens, as devices check it: it only ever grows (archipel/protocol/revocations.py).
 */

import { CertificateError } from "./errors.js";
import { tokenIdOf, type VerifiedDevice } from "./identity.js";
import type { Revocations } from "./messages/identity.js";

export interface Revoked {
  readonly devices: ReadonlySet<string>;
  readonly tokens: ReadonlySet<string>;
}

export const NOBODY: Revoked = { devices: new Set(), tokens: new Set() };

export function revokedOf(list: Revocations | null): Revoked {
  return list === null ? NOBODY : { devices: new Set(list.devices), tokens: new Set(list.tokens) };
}

/** Raises CertificateError for a revoked device, or one that enrolled with a revoked token. */
export async function requireMember(revoked: Revoked, device: VerifiedDevice): Promise<void> {
  if (revoked.devices.has(device.deviceId)) {
    throw new CertificateError(`cohort: device ${device.deviceId} was revoked`);
  }
  if (revoked.tokens.size && revoked.tokens.has(await tokenIdOf(device.tokenKey))) {
    throw new CertificateError(`cohort: device ${device.deviceId} enrolled with a token that was revoked`);
  }
}

/** Raises CertificateError unless the list `after` may follow `before`, the last one that the device has seen. */
export function checkSuccessor(before: Revocations | null, after: Revocations | null, population: string): void {
  if (after !== null && after.population !== population) {
    throw new CertificateError(`revocations: for population ${after.population}, expected ${population}`);
  }
  if (before === null) return;
  if (after === null || after.epoch < before.epoch) {
    const epoch = after === null ? "there is none" : `the server's is ${after.epoch}`;
    throw new CertificateError(`revocations: this device has seen epoch ${before.epoch}, ${epoch}; it never goes back`);
  }
  // The epoch alone proves nothing: a server can drop an entry and count on.
  for (const [what, old, now] of [
    ["device", before.devices, after.devices],
    ["token", before.tokens, after.tokens],
  ] as const) {
    const kept = new Set(now);
    const lost = old.find((each) => !kept.has(each));
    if (lost !== undefined) {
      throw new CertificateError(`revocations: ${what} ${lost} is not in the server's list any more`);
    }
  }
}
