/** Complaints: proofs that a peer signed an envelope without shares (archipel/protocol/secagg/complaints.py). */

import { hex } from "../../bundle/digests.js";
import { sameBytes } from "../bytes.js";
import { agree, agreementKey, digest, publicKeyOf } from "../crypto.js";
import { ConsistencyError, ShareError } from "../errors.js";
import { encode } from "../messages/fields.js";
import type { Complaint, Complaints } from "../messages/secure.js";
import { checkSignature, openShares } from "./envelope.js";
import { clamp, envelopeKey } from "./keys.js";
import type { Session } from "./session.js";

/**
 * Returns where the complaint holds. Raises CertificateError where the accused did not sign the envelope, ShareError
 * where it opens, where the key is not the advertised one, or where one of the two is not in the cohort.
 */
export async function checkComplaint(complaint: Complaint, session: Session): Promise<void> {
  const { accused, complainer } = complaint;
  const what = `complaint of ${complainer} about ${accused}`;
  if (accused === complainer || !session.peers.has(accused) || !session.peers.has(complainer)) {
    throw new ShareError(`${what}: expected two members of the cohort`);
  }
  const sender = session.peer(accused);
  const associated = session.associated(accused, complainer);
  await checkSignature(sender.deviceKey, complaint.signature, complaint.ciphertext, associated, accused);
  // X25519 ignores five bits of a private key. With one accepted spelling, a complaint cannot be varied into others
  // that have another digest and are just as valid.
  if (!sameBytes(complaint.key, clamp(complaint.key))) {
    throw new ShareError(`${what}: the key is not spelled as X25519 uses it`);
  }
  const publicKey = await publicKeyOf(complaint.key);
  if (!(await session.isKeyFor(accused, complainer, publicKey, complaint.path))) {
    throw new ShareError(`${what}: the key is not the one that ${complainer} advertised for ${accused}`);
  }
  const shared = await agree(await agreementKey(complaint.key), sender.cipherKey);
  const key = await envelopeKey(shared, session.salt, sender.cipherKey, publicKey);
  try {
    await openShares(key, complaint.ciphertext, associated, accused);
  } catch (error) {
    if (error instanceof ShareError) return;
    throw error;
  }
  throw new ShareError(`${what}: the envelope opens, and holds two shares`);
}

/** The accused devices. Raises ConsistencyError unless they are sorted and distinct, else as `checkComplaint`. */
export async function checkComplaints(list: Complaints, session: Session): Promise<ReadonlySet<string>> {
  const accused = list.complaints.map((complaint) => complaint.accused);
  if (!isAscending(accused)) {
    throw new ConsistencyError(
      "complaints: accused devices must be sorted and distinct, so that a list has one spelling",
    );
  }
  for (const complaint of list.complaints) await checkComplaint(complaint, session);
  return new Set(accused);
}

/** SHA-256 (hex) over the JSON of the list, which every survivor signs. */
export async function complaintsDigest(list: Complaints): Promise<string> {
  return hex(await digest(encode(list)));
}

export function isAscending(ids: readonly string[]): boolean {
  return ids.every((one, index) => index === 0 || (ids[index - 1] as string) < one);
}
