/** What everything in a round over neighbours is bound to (archipel/protocol/secagg_plus/member.py and envelope.py). */

import { type Bytes, concat, unhex } from "../bytes.js";

/** The names of a round, in hexadecimal digits: 32 of its id and 64 of the plan's digest. */
export interface Session {
  readonly roundId: string;
  readonly plan: string;
}

export function sessionBytes(session: Session): Bytes {
  return unhex(session.roundId + session.plan);
}

/** With the root of its cohort. */
export function bind(session: Session, root: Uint8Array): Bytes {
  return concat(sessionBytes(session), root);
}
