/** What a device checks of the server's messages in a round over neighbours, before it acts on them. */

import { type Bytes, sameBytes } from "../bytes.js";
import { KEY_BYTES } from "../crypto.js";
import { ConsistencyError, ThresholdError } from "../errors.js";
import type { VerifiedDevice } from "../identity.js";
import type { Revoked } from "../revocations.js";
import { Distinct, readMember, type RoundKeys } from "./member.js";
import { divide, type Invitation, type Neighbours, type Partners, type Question } from "./messages.js";
import type { Session } from "./session.js";
import { checkMembers, hashMember } from "./tree.js";

/** Of a neighbour that was verified. */
export interface Neighbour {
  readonly deviceKey: Bytes;
  readonly keys: RoundKeys;
}

/** What the neighbours must agree with. */
export interface Expected {
  readonly session: Session;
  readonly enrolmentKey: Uint8Array;
  readonly own: VerifiedDevice;
  /** The member that this device advertised. */
  readonly ownMember: Bytes;
  readonly revoked: Revoked;
}

/**
 * The neighbours at the places that were drawn, verified: they and this device are in the cohort, each with keys of its
 * own. Raises CertificateError, MessageError, SecureAggregationError or ConsistencyError.
 */
export async function checkNeighbours(
  { members, proof }: Neighbours,
  drawn: readonly number[],
  invitation: Invitation,
  { session, enrolmentKey, own, ownMember, revoked }: Expected,
): Promise<ReadonlyMap<number, Neighbour>> {
  const places = [...drawn, invitation.place];
  if (members.length !== places.length) {
    throw new ConsistencyError(`neighbours: expected ${places.length} members, got ${members.length}`);
  }
  const leaves = await Promise.all(members.map(hashMember));
  const byPlace = new Map(places.map((place, index) => [place, leaves[index] as Bytes]));
  await checkMembers(invitation.root, invitation.size, byPlace, proof);
  // With other keys than its own, which an earlier attempt may have signed, nobody could open anything.
  if (!sameBytes(members.at(-1) as Bytes, ownMember)) {
    throw new ConsistencyError("cohort: this device is not at its place with the keys that it advertised");
  }
  const distinct = new Distinct();
  const found = new Map<number, Neighbour>();
  for (const [index, place] of places.entries()) {
    const { device, keys } = await readMember(
      members[index] as Bytes, session, enrolmentKey, own.population, revoked,
    );
    if (device.kind !== own.kind) {
      throw new ConsistencyError(`cohort: ${device.deviceId} is a ${device.kind}, this participant a ${own.kind}`);
    }
    distinct.add(device, keys);
    found.set(place, { deviceKey: new Uint8Array(device.deviceKey), keys });
  }
  found.delete(invitation.place);
  return found;
}

/** Raises ConsistencyError for a question that no honest server asks a device that holds these shares. */
export function checkQuestion({ present, left }: Question, held: ReadonlyMap<number, unknown>): void {
  const asked = [...present, ...left];
  if (new Set(asked).size !== asked.length) {
    throw new ConsistencyError("question: a dealer is asked for twice; both of its shares would unmask it");
  }
  const foreign = asked.filter((dealer) => !held.has(dealer));
  if (foreign.length) {
    throw new ConsistencyError(`question: this device holds no shares of places ${foreign.slice(0, 3).join(", ")}`);
  }
}

/**
 * The mask keys of everybody that the device at place `own` shares a mask with, by place. `drawn` are the partners that
 * it drew, of whom `needed` have to be there still. Raises ConsistencyError or ThresholdError.
 */
export function remaining(
  partners: Partners,
  drawn: ReadonlyMap<number, Uint8Array>,
  own: number,
  needed: number,
): ReadonlyMap<number, Uint8Array> {
  const gone = new Set(partners.gone);
  if ([...gone].some((place) => !drawn.has(place))) {
    throw new ConsistencyError("partners: the server says that somebody left whom this device did not draw");
  }
  const stayed = [...drawn].filter(([place]) => !gone.has(place));
  if (stayed.length < Math.min(needed, drawn.size)) {
    throw new ThresholdError(
      `partners: ${stayed.length} of ${drawn.size} are still there, ${needed} are needed to hide a vector`,
    );
  }
  const keys = divide("partners", partners.mask_keys, KEY_BYTES, partners.others.length);
  const others = new Map(partners.others.map((place, index) => [place, keys[index] as Uint8Array]));
  if (others.has(own) || others.size !== partners.others.length) {
    throw new ConsistencyError("partners: this device itself, or somebody twice");
  }
  // A pair that drew each other shares one mask, with the key that this device has verified.
  return new Map<number, Uint8Array>([...others, ...stayed]);
}
