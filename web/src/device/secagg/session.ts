/** One session of a secure round: its members with their keys (archipel/protocol/secagg/session.py). */

import type { Bytes } from "../bytes.js";
import { associatedData } from "./envelope.js";
import { isUnder } from "./key_tree.js";
import { roundSalt } from "./keys.js";

/** A participant with its identity key and the public keys that it made for the round, 32 bytes each. */
export interface Peer {
  readonly deviceId: string;
  readonly deviceKey: Uint8Array;
  readonly cipherKey: Uint8Array;
  readonly maskKey: Uint8Array;
  readonly envelopeRoot: Uint8Array;
  /** Its index in the sorted cohort, from 0; in secret sharing its x is one more. */
  readonly place: number;
}

/** What the members of one cohort agree on. `plan` and `cohort` are digests (hex). */
export class Session {
  constructor(
    readonly roundId: string,
    readonly plan: string,
    readonly cohort: string,
    /** U1 by device id, in sorted order. */
    readonly peers: ReadonlyMap<string, Peer>,
    /** The plan's max_cohort, the number of envelope keys that each member has. */
    readonly leaves: number,
  ) {}

  get salt(): Bytes {
    return roundSalt(this.roundId, this.plan);
  }

  /** The member with this id, which the caller knows to be one. */
  peer(deviceId: string): Peer {
    return this.peers.get(deviceId) as Peer;
  }

  /** The bytes that the envelope from `sender` to `recipient` is bound to. */
  associated(sender: string, recipient: string): Bytes {
    return associatedData(this.roundId, this.cohort, sender, recipient);
  }

  /** Whether `publicKey` is the key that `recipient` advertised for envelopes from `sender`. */
  isKeyFor(sender: string, recipient: string, publicKey: Uint8Array, path: Uint8Array): Promise<boolean> {
    return isUnder(this.peer(recipient).envelopeRoot, publicKey, this.peer(sender).place, path, this.leaves);
  }
}
