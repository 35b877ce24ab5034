/** The record of an enrolment. Its keys are pinned: no later answer of the server changes them. */

import { hex } from "../bundle/digests.js";
import type { Manifest } from "../bundle/manifest.js";
import { sameBytes } from "./bytes.js";
import type { Config } from "./config.js";
import { ClientError } from "./errors.js";
import { verifyChain } from "./identity.js";
import type { Chain, EnrolmentToken, Root } from "./messages/identity.js";
import type { DeviceDatabase } from "./storage/database.js";
import type { Vault } from "./storage/vault.js";

export interface Enrolment {
  readonly deviceId: string;
  readonly server: string;
  readonly serverKey: Uint8Array;
  readonly enrolmentKey: Uint8Array;
  readonly publisherKeys: readonly Uint8Array[];
  readonly population: string;
  readonly chain: Chain;
  /** Where the server is an edge server; left out by records that older pages wrote. */
  readonly root?: Root | null;
}

/** The record; null before enrolment. Raises ClientError where it is not for this device's key. */
export async function readEnrolment(database: DeviceDatabase, vault: Vault): Promise<Enrolment | null> {
  const record = await database.get<Enrolment>("own", "enrolment");
  if (record === undefined) return null;
  await checkOwn(record, vault);
  return record;
}

/** Record the enrolment; on disk when it resolves. Raises CertificateError or ClientError. */
export async function recordEnrolment(
  database: DeviceDatabase,
  vault: Vault,
  token: EnrolmentToken,
  chain: Chain,
  server: string,
): Promise<Enrolment> {
  const { deviceId } = await verifyChain(chain, token.enrolment_key, { population: token.population });
  const record: Enrolment = {
    deviceId,
    server,
    serverKey: token.server_key,
    enrolmentKey: token.enrolment_key,
    publisherKeys: token.publisher_keys,
    population: token.population,
    chain,
    root: token.root,
  };
  await checkOwn(record, vault);
  await database.write({ store: "own", key: "enrolment", value: record });
  return record;
}

/**
 * The record with the server in it that keeps the weights log of this bundle, with its key and population: the root
 * where a tree of servers trains the bundle.
 */
export function ofLog(record: Enrolment, { privacy }: Manifest): Enrolment {
  const { root } = record;
  if (!root || privacy.aggregators === null) return record;
  return { ...record, serverKey: root.server_key, enrolmentKey: root.enrolment_key, population: root.population };
}

/** The record with only those pinned publisher keys that the owner allows: `publishers` may only narrow them. */
export function withAllowedPublishers(record: Enrolment, config: Config): Enrolment {
  if (!config.publishers.length) return record;
  const allowed = new Set(config.publishers.map((key) => key.toLowerCase()));
  return { ...record, publisherKeys: record.publisherKeys.filter((key) => allowed.has(hex(key))) };
}

async function checkOwn(record: Enrolment, vault: Vault): Promise<void> {
  const { deviceKey } = await verifyChain(record.chain, record.enrolmentKey, { population: record.population });
  if (!sameBytes(deviceKey, vault.identity.publicKey)) {
    throw new ClientError("the enrolment is not for the key of this device; erase it, and enrol with a new token");
  }
}
