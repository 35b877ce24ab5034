/**
 * What devices sign of a round over neighbours: that they take a dealer as present, and that they were in it themselves
 * (archipel/protocol/secagg_plus/inclusion.py).
 *
 * Who has signed the first never shows a share of that dealer's mask key. The second proves to others that devices took
 * part in the round.
 */

import { type Bytes, concat, label, uint32Bytes } from "../bytes.js";
import { verifies } from "../crypto.js";
import { ConsistencyError, ThresholdError } from "../errors.js";
import { divide, type Inclusions, SIGNATURE_BYTES } from "./messages.js";

const [INCLUDED, PRESENT] = [label("included", 2), label("present", 2)];

/** The bytes that the holder signs; `bound` names the session, the others are places in its cohort. */
export function inclusion(bound: Uint8Array, dealer: number, holder: number): Bytes {
  return concat(INCLUDED, bound, uint32Bytes(dealer), uint32Bytes(holder));
}

/** The bytes that a device signs when it answers the last question of a round; `bound` as of `inclusion`. */
export function presence(bound: Uint8Array): Bytes {
  return concat(PRESENT, bound);
}

/**
 * Raises unless at least `threshold` of a dealer's neighbours signed that it is present. `deviceKeys` are the
 * neighbours' by place. A wrong signature does not count: its neighbour may have sent it so.
 *
 * Raises ConsistencyError for others or one twice, ThresholdError for too few.
 */
export async function requireInclusions(
  inclusions: Inclusions,
  deviceKeys: ReadonlyMap<number, Uint8Array>,
  bound: Uint8Array,
  dealer: number,
  threshold: number,
): Promise<void> {
  const { neighbours } = inclusions;
  const signatures = divide("inclusions", inclusions.signatures, SIGNATURE_BYTES, neighbours.length);
  const seen = new Set<number>();
  let confirmed = 0;
  for (const [index, neighbour] of neighbours.entries()) {
    const key = deviceKeys.get(neighbour);
    if (key === undefined || seen.has(neighbour)) {
      throw new ConsistencyError(`inclusions: place ${neighbour} is no neighbour of this device, or twice`);
    }
    seen.add(neighbour);
    if (await verifies(key, signatures[index] as Bytes, inclusion(bound, dealer, neighbour))) confirmed++;
  }
  if (confirmed < threshold) {
    throw new ThresholdError(
      `inclusions: ${confirmed} neighbours take this device as present, the threshold is ${threshold}; ` +
        "nothing is shown",
    );
  }
}
