/** U3 and U4: who is in the sum, and who signed that (archipel/protocol/secagg/checks.py). */

import { hex } from "../../bundle/digests.js";
import { sameBytes } from "../bytes.js";
import { digest } from "../crypto.js";
import { ConsistencyError, MessageError, SecureAggregationError, ThresholdError } from "../errors.js";
import { encode } from "../messages/fields.js";
import { MAX_STATEMENT_BYTES, type Sealed } from "../messages/identity.js";
import { type Confirmation, confirmation, type Confirmations, type Survivors } from "../messages/secure.js";
import { unseal } from "../sealed.js";
import { isAscending } from "./complaints.js";
import type { Session } from "./session.js";

/** SHA-256 (hex) over the JSON of U3. Raises ConsistencyError unless the devices are sorted and distinct. */
export async function survivorsDigest(survivors: Survivors): Promise<string> {
  if (!isAscending(survivors.devices)) {
    throw new ConsistencyError("survivors: device ids must be sorted and distinct, so that a set has one spelling");
  }
  return hex(await digest(encode(survivors)));
}

/**
 * Verifies a confirmation that must say the same as `expected`. Raises CertificateError, MessageError,
 * SecureAggregationError for another round, plan or cohort, or ConsistencyError for other survivors or complaints.
 */
export async function checkConfirmation(
  sealed: Sealed,
  deviceKey: Uint8Array,
  expected: Confirmation,
): Promise<void> {
  const found = await unseal("confirmation", sealed, deviceKey, confirmation, MAX_STATEMENT_BYTES);
  for (const name of ["round_id", "plan", "cohort"] as const) {
    if (found[name] !== expected[name]) {
      throw new SecureAggregationError(`${differs(name, expected, found)}; it is for another session`);
    }
  }
  for (const name of ["complaints", "survivors"] as const) {
    if (found[name] !== expected[name]) {
      throw new ConsistencyError(`${differs(name, expected, found)}; participants were told different ${name}`);
    }
  }
  if (!sameBytes(sealed.body, encode(expected))) {
    // All confirmations of a round are the same bytes, so that one copy and the signatures prove it to others.
    throw new MessageError("confirmation: expected canonical JSON: keys sorted, no blanks");
  }
}

/**
 * Checks that at least `threshold` of the survivors signed what this device signed, `own`. Raises as
 * `checkConfirmation`, ThresholdError for fewer, or ConsistencyError.
 */
export async function requireConfirmations(
  { confirmations }: Confirmations,
  survivors: readonly string[],
  own: Confirmation | null,
  session: Session,
  threshold: number,
): Promise<void> {
  if (own === null) throw new ConsistencyError("confirmations: this device has signed none");
  const confirmed = new Set<string>();
  for (const { device, confirmation: sealed } of confirmations) {
    if (!survivors.includes(device)) {
      throw new ConsistencyError(`confirmations: ${device} is not one of the survivors`);
    }
    // Otherwise a server could reach the threshold by repeating one signature.
    if (confirmed.has(device)) throw new ConsistencyError(`confirmations: ${device} twice`);
    await checkConfirmation(sealed, session.peer(device).deviceKey, own);
    confirmed.add(device);
  }
  if (confirmed.size < threshold) {
    throw new ThresholdError(`confirmations: ${confirmed.size}, the threshold is ${threshold}; nothing is revealed`);
  }
}

function differs(name: keyof Confirmation, expected: Confirmation, found: Confirmation): string {
  return `confirmation: expected ${name} ${expected[name].slice(0, 16)}..., got ${found[name].slice(0, 16)}...`;
}
