/** What the devices of a secure round have signed, as the evidence for its step in a server's log. */

import { type Bytes, concat, label } from "./bytes.js";
import { ProvenanceError } from "./errors.js";
import { decode } from "./messages/fields.js";
import type { RoundPlan } from "./messages/rounds.js";
import { confirmation } from "./messages/secure.js";
import type { Endorsement } from "./messages/weights_log.js";
import { bodyDigest } from "./sealed.js";
import { survivorsDigest } from "./secagg/confirmations.js";
import { presence } from "./secagg_plus/inclusion.js";
import { bind } from "./secagg_plus/session.js";

const ROOT_BYTES = 32;

/** The bytes that all endorsers of a round of this plan signed. Raises ProvenanceError or MessageError. */
export async function signedByDevices(evidence: Endorsement, plan: RoundPlan, where: string): Promise<Bytes> {
  const digest = await bodyDigest(evidence.plan);
  if (plan.protocol !== "complete") {
    // They signed the round, its plan and the root of their cohort; each knows its neighbours only.
    const { length } = evidence.confirmation;
    if (length !== ROOT_BYTES) {
      throw new ProvenanceError(`${where}: its cohort's root has ${length} bytes, not ${ROOT_BYTES}`);
    }
    return presence(bind({ roundId: plan.round_id, plan: digest }, evidence.confirmation));
  }
  // All confirmations of a round are the same bytes, so one body and the signatures are enough.
  const confirmed = decode("confirmation", evidence.confirmation, confirmation);
  if (
    confirmed.round_id !== plan.round_id || confirmed.plan !== digest ||
    confirmed.survivors !== (await survivorsDigest(evidence.survivors))
  ) {
    throw new ProvenanceError(`${where}: what the devices signed is of another round, plan or survivor set`);
  }
  return concat(label("confirmation"), evidence.confirmation);
}
