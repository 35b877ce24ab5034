/** What the device must not forget of publishers and revocations. */

import { sha256 } from "../../bundle/digests.js";
import type { Bundle } from "../../bundle/reader.js";
import { concat, unhex, utf8 } from "../bytes.js";
import type { Enrolment } from "../enrolment.js";
import { ClientError } from "../errors.js";
import { decode } from "../messages/fields.js";
import { type Revocations, sealed } from "../messages/identity.js";
import { revocations } from "../messages/rounds.js";
import { checkValidity } from "../policy.js";
import { checkSuccessor, type Revoked, revokedOf } from "../revocations.js";
import { unseal } from "../sealed.js";
import type { DeviceDatabase } from "./database.js";
import type { Files } from "./files.js";

const MAX_NAMES = 1024;
const MAX_REVOCATION_BYTES = 2 << 20;

/**
 * Check that devices may use the bundle now, and remember its sequence. Raises PolicyError for a bundle that is for
 * other populations, has expired or was replaced (archipel/client/downloads/publisher_book.py).
 */
export async function checkPublished(
  database: DeviceDatabase,
  bundle: Bundle,
  population: string,
  now: number,
): Promise<void> {
  const { manifest } = bundle;
  const seen = (await database.get<Readonly<Record<string, number>>>("books", "publishers")) ?? {};
  const name = await sha256(concat(unhex(bundle.publisher), utf8(manifest.name)));
  const known = seen[name] ?? 0;
  checkValidity(manifest, population, now, known);
  if (manifest.sequence <= known) return;
  if (seen[name] === undefined && Object.keys(seen).length >= MAX_NAMES) {
    throw new ClientError(`more than ${MAX_NAMES} models with a sequence; erase the device`);
  }
  await database.write({ store: "books", key: "publishers", value: { ...seen, [name]: manifest.sequence } });
}

interface SeenRevocations {
  readonly digest: string;
  readonly list: Revocations;
}

/**
 * The revoked devices and tokens in the list with this digest, which a plan names; null: no list. Raises
 * CertificateError or MessageError if it must not follow the last one that this device has seen, RefusedError,
 * UnreachableError (archipel/client/connection/revocation_book.py).
 */
export async function fetchRevoked(
  database: DeviceDatabase,
  files: Files,
  enrolment: Enrolment,
  digest: string | null,
): Promise<Revoked> {
  const { population, serverKey } = enrolment;
  const seen = await database.get<SeenRevocations>("books", "revocations");
  if (seen !== undefined && seen.digest === digest) return revokedOf(seen.list);
  if (digest === null) {
    // A plan without a list claims that nobody was ever revoked, which contradicts any list that was seen.
    checkSuccessor(seen?.list ?? null, null, population);
    return revokedOf(null);
  }
  const data = await files.once(digest, MAX_REVOCATION_BYTES);
  const list = await unseal("revocations", decode("revocations", data, sealed), serverKey, revocations);
  checkSuccessor(seen?.list ?? null, list, population);
  // On disk before the device acts on it: so the server cannot return to an older list after a reload.
  await database.write({ store: "books", key: "revocations", value: { digest, list } satisfies SeenRevocations });
  return revokedOf(list);
}
