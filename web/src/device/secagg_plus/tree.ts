/**
 * A Merkle tree over a cohort: one hash stands for all members, and a proof for the few that somebody drew
 * (archipel/protocol/secagg_plus/tree.py).
 *
 * A device learns the root and the number of members, then draws places at random, and only then gets the members
 * there. So the server cannot choose who is at a place once it knows who asks.
 */

import { type Bytes, concat, label, sameBytes, uint32Bytes } from "../bytes.js";
import { digest } from "../crypto.js";
import { ConsistencyError } from "../errors.js";

const HASH_BYTES = 32;
const [MEMBER, NODE, COHORT] = [label("member", 2), label("member-node", 2), label("cohort", 2)];

/** The leaf of a member, as the server sends it. */
export function hashMember(member: Uint8Array): Promise<Bytes> {
  return digest(concat(MEMBER, member));
}

/** Raises ConsistencyError unless `leaves`, by place, are those of the cohort of `size` members under `root`. */
export async function checkMembers(
  root: Uint8Array,
  size: number,
  leaves: ReadonlyMap<number, Uint8Array>,
  proof: Uint8Array,
): Promise<void> {
  const places = [...leaves.keys()];
  if (!places.length || places.some((place) => place < 0 || place >= size) || proof.length % HASH_BYTES) {
    throw new ConsistencyError("cohort: members at places that it does not have, or a proof of broken hashes");
  }
  let used = 0;
  let level: ReadonlyMap<number, Uint8Array> = leaves;
  for (let depth = depthOf(size); depth; depth--) {
    const whole = new Map(level);
    for (const place of [...level.keys()].sort((one, other) => one - other)) {
      if (level.has(place ^ 1)) continue;
      // Of a pair of which one is known, the proof has the other.
      const sibling = proof.subarray(used, used + HASH_BYTES);
      if (!sibling.length) throw new ConsistencyError("cohort: the proof of its members is too short");
      whole.set(place ^ 1, sibling);
      used += HASH_BYTES;
    }
    const above = [...new Set([...whole.keys()].map((place) => place >> 1))];
    const nodes = await Promise.all(
      above.map((place) =>
        digest(concat(NODE, whole.get(2 * place) as Uint8Array, whole.get(2 * place + 1) as Uint8Array)),
      ),
    );
    level = new Map(above.map((place, index) => [place, nodes[index] as Bytes]));
  }
  if (used < proof.length) throw new ConsistencyError("cohort: the proof of its members is too long");
  // With the size: an empty place cannot be passed off as a member, or the other way round.
  const top = await digest(concat(COHORT, uint32Bytes(size), level.get(0) as Uint8Array));
  if (!sameBytes(top, root)) {
    throw new ConsistencyError("cohort: these members are not those that its root stands for");
  }
}

/** The number of levels below the top. */
export function depthOf(size: number): number {
  return 32 - Math.clz32(size - 1);
}
