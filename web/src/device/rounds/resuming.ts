/** Rounds that a reload interrupted, as the journal has them (archipel/client/rounds/resuming.py). */

import { ProtocolError } from "../errors.js";
import { decode } from "../messages/fields.js";
import { type Sealed, sealed } from "../messages/identity.js";
import { type RoundPlan, roundPlan } from "../messages/rounds.js";
import { bodyDigest, unseal } from "../sealed.js";
import type { Journal, OpenRound } from "../storage/journal.js";

/** A round to take part in: its plan, as the server sealed it too, and the digest of that. */
export interface Assigned {
  readonly plan: RoundPlan;
  readonly sealed: Sealed;
  readonly digest: string;
}

/** The assigned round of a plan. Raises MessageError, or CertificateError where the server did not seal it. */
export async function assignedOf(sealedPlan: Sealed, serverKey: Uint8Array): Promise<Assigned> {
  const plan = await unseal("plan", sealedPlan, serverKey, roundPlan);
  return { plan, sealed: sealedPlan, digest: await bodyDigest(sealedPlan) };
}

/** A round to go on with, and its place in the journal. */
export interface Interrupted {
  readonly assigned: Assigned;
  readonly journal: OpenRound;
}

/** The round that is to be resumed; null if there is none. One whose plan is lost is not: the device leaves it. */
export async function findInterrupted(journal: Journal, serverKey: Uint8Array): Promise<Interrupted | null> {
  for (const opened of await journal.unfinished()) {
    if (!opened.entry.resumes || !opened.keysSent) continue;
    const kept = await opened.kept("plan");
    if (kept === null) continue;
    try {
      const assigned = await assignedOf(decode("plan", kept, sealed), serverKey);
      // The one that this device began with, whatever else the server may have sealed.
      if (assigned.digest === opened.entry.plan) return { assigned, journal: opened };
    } catch (error) {
      if (!(error instanceof ProtocolError)) throw error;
    }
  }
  return null;
}
