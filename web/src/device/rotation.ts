/** A device's new key, from the next key in the database to the server's answer (archipel/client/connection). */

import { sameBytes } from "./bytes.js";
import type { Device } from "./device.js";
import type { Enrolment } from "./enrolment.js";
import { ClientError, RefusedError } from "./errors.js";
import { checkRotations, rotationRequest, verifyChain } from "./identity.js";
import { encode } from "./messages/fields.js";
import { rotationResponse } from "./messages/identity.js";
import type { Transport } from "./rounds/transport.js";

/** The device is in a round, or the server does not support rotations. The old key stays valid. */
const NOT_NOW: ReadonlySet<number> = new Set([404, 405, 409]);

/**
 * Replace the device's key; the changed record, or null if the server cannot do that now. After a reload at any point
 * the same request may be sent again: the next key is in the database before the server hears of it, and the old one
 * until the record is for the next.
 *
 * Raises CertificateError if the key was replaced as often as is allowed, UnreachableError or RefusedError.
 */
export async function rotate(transport: Transport, device: Device, record: Enrolment): Promise<Enrolment | null> {
  const { database, vault } = device;
  // Before a key is made that the server would never take.
  checkRotations(record.chain);
  const next = await vault.nextIdentity(database);
  const request = await rotationRequest(record.chain, vault.identity, next, record.serverKey);
  try {
    const path = `/v1/devices/${record.deviceId}/key`;
    await transport.call("PUT", path, rotationResponse, { body: encode(request) });
  } catch (error) {
    if (error instanceof RefusedError && NOT_NOW.has(error.status)) return null;
    throw error;
  }
  const rotations = [...(record.chain.rotations ?? []), request.certificate];
  const changed: Enrolment = { ...record, chain: { ...record.chain, rotations } };
  const { deviceKey } = await verifyChain(changed.chain, record.enrolmentKey, { population: record.population });
  if (!sameBytes(deviceKey, next.publicKey)) throw new ClientError("rotation: the certificate is for another key");
  await vault.replaceIdentity(database, { store: "own", key: "enrolment", value: changed });
  return changed;
}
