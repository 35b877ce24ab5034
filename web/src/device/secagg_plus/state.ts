/**
 * What a device remembers of a secure round over neighbours, so that a reload does not end its part in it
 * (archipel/protocol/secagg_plus/state.py).
 *
 * A device writes this, sealed, before it sends what a step returned. So whatever it has sent is in here: after a reload
 * it sends the same again, and never masks another vector with these masks or answers another question. What it had
 * computed and not yet written was not sent either, and is computed anew.
 */

import { hex } from "../../bundle/digests.js";
import { type Bytes, unhex } from "../bytes.js";
import { KEY_BYTES } from "../crypto.js";
import { ConsistencyError, MessageError, SecureAggregationError } from "../errors.js";
import type { Pair } from "./envelope.js";
import { joinKeys, MAX_MEMBER_BYTES, type RoundKeys, splitKeys } from "./member.js";
import { INVITATION, type Invitation, QUESTION, type Question } from "./messages.js";
import { bytes, type Codec, type CodecsOf, integer, listOf, pack, row, unpack } from "./msgpack.js";
import type { Session } from "./session.js";
import { SHARE_BYTES } from "./shares.js";
import { MAX_DEVICES } from "./sizes.js";

export const STEPS = ["advertise", "draw", "deal", "receive", "mask", "confirm", "answer", "done"] as const;
export type Step = (typeof STEPS)[number];

export const LEFT = "nothing, the device left the round";

/** The longest message that a step returns. */
const MAX_SAID_BYTES = 16 << 20;
const NOTHING = new Uint8Array();
const NO_KEYS: RoundKeys = { cipherKey: NOTHING, maskKey: NOTHING, seedDigest: NOTHING };

/** Of one device in one round; secrets are empty before they are made and once they are dropped. */
export class State {
  next: Step | typeof LEFT = "advertise";
  cipherSecret: Bytes = NOTHING;
  maskSecret: Bytes = NOTHING;
  seed: Bytes = NOTHING;
  /** By dealer its shares that this device holds. */
  held: Map<number, Pair> = new Map();
  /** The keys and the member that it advertised. */
  public: RoundKeys = NO_KEYS;
  member: Bytes = NOTHING;
  invitation: Invitation | null = null;
  /** The places that it drew. */
  neighbours: readonly number[] = [];
  /** Of its partners, and of its neighbours, by place. */
  maskKeys: ReadonlyMap<number, Bytes> = new Map();
  deviceKeys: ReadonlyMap<number, Bytes> = new Map();
  /** The one that it has confirmed. */
  question: Question | null = null;

  constructor(
    readonly session: Session,
    readonly device: string,
  ) {}

  /** Drops all secrets. */
  forget(): void {
    this.cipherSecret = this.maskSecret = this.seed = NOTHING;
    this.held.clear();
  }
}

interface Keyed<T> {
  readonly place: number;
  readonly value: T;
}

/** Lists of at most one stand for what there may not be. */
interface Written {
  readonly round: Bytes;
  readonly plan: Bytes;
  readonly device: Bytes;
  readonly next: number;
  readonly secrets: readonly Bytes[];
  readonly held: readonly Keyed<Pair>[];
  readonly public: readonly Bytes[];
  readonly member: Bytes;
  readonly invitation: readonly Invitation[];
  readonly neighbours: readonly number[];
  readonly maskKeys: readonly Keyed<Bytes>[];
  readonly deviceKeys: readonly Keyed<Bytes>[];
  readonly question: readonly Question[];
  readonly said: Bytes;
}

const place = integer(0, MAX_DEVICES - 1);
const key = bytes(KEY_BYTES, KEY_BYTES);
const share = bytes(SHARE_BYTES, SHARE_BYTES);

function keyed<T>(value: Codec<T>): Codec<readonly Keyed<T>[]> {
  return listOf(row<Keyed<T>>({ place, value } as CodecsOf<Keyed<T>>), MAX_DEVICES);
}

const written = row<Written>({
  round: bytes(16, 16),
  plan: bytes(32, 32),
  device: bytes(16, 16),
  next: integer(0, STEPS.length - 1),
  secrets: listOf(bytes(KEY_BYTES), 3),
  held: keyed(row<Pair>({ maskKey: share, seed: share })),
  public: listOf(bytes(3 * KEY_BYTES, 3 * KEY_BYTES), 1),
  member: bytes(MAX_MEMBER_BYTES),
  invitation: listOf(INVITATION.codec, 1),
  neighbours: listOf(place, MAX_DEVICES),
  maskKeys: keyed(key),
  deviceKeys: keyed(key),
  question: listOf(QUESTION.codec, 1),
  said: bytes(MAX_SAID_BYTES),
});

/**
 * The state as it is kept, with what the device is about to send. It has secrets: seal it before it leaves the memory.
 * Raises SecureAggregationError where the device has left the round.
 */
export function writeState(state: State, said: Bytes): Bytes {
  const { session } = state;
  if (state.next === LEFT) throw new SecureAggregationError(`round ${session.roundId}: this device has left it`);
  const entries = <T>(map: ReadonlyMap<number, T>): Keyed<T>[] => [...map].map(([at, value]) => ({ place: at, value }));
  const there = <T>(value: T | null): readonly T[] => (value === null ? [] : [value]);
  return pack<Written>(
    {
      round: unhex(session.roundId),
      plan: unhex(session.plan),
      device: unhex(state.device),
      next: STEPS.indexOf(state.next),
      secrets: [state.cipherSecret, state.maskSecret, state.seed],
      held: entries(state.held),
      public: state.public === NO_KEYS ? [] : [joinKeys(state.public)],
      member: state.member,
      invitation: there(state.invitation),
      neighbours: state.neighbours,
      maskKeys: entries(state.maskKeys),
      deviceKeys: entries(state.deviceKeys),
      question: there(state.question),
      said,
    },
    written,
  );
}

/**
 * What `writeState` wrote of this device in this round. Raises MessageError, which shows nothing of it, or
 * ConsistencyError for another round or device.
 */
export function readState(data: Uint8Array, session: Session, device: string): { state: State; said: Bytes } {
  const kept = unpacked(data);
  const [round, plan, owner] = [kept.round, kept.plan, kept.device].map(hex);
  if (round !== session.roundId || plan !== session.plan || owner !== device) {
    throw new ConsistencyError(
      `state: it is of device ${owner} in round ${round}, expected ${device} in ${session.roundId}`,
    );
  }
  const [cipherSecret, maskSecret, seed] = kept.secrets as [Bytes, Bytes, Bytes];
  const mapOf = <T>(rows: readonly Keyed<T>[]): Map<number, T> => new Map(rows.map((each) => [each.place, each.value]));
  const state = new State(session, device);
  state.next = STEPS[kept.next] as Step;
  [state.cipherSecret, state.maskSecret, state.seed] = [cipherSecret, maskSecret, seed];
  state.held = mapOf(kept.held);
  state.public = kept.public[0] === undefined ? NO_KEYS : splitKeys(kept.public[0]);
  state.member = kept.member;
  state.invitation = kept.invitation[0] ?? null;
  state.neighbours = kept.neighbours;
  state.maskKeys = mapOf(kept.maskKeys);
  state.deviceKeys = mapOf(kept.deviceKeys);
  state.question = kept.question[0] ?? null;
  return { state, said: kept.said };
}

function unpacked(data: Uint8Array): Written {
  try {
    const kept = unpack("state", data, written);
    if (kept.secrets.length === 3) return kept;
  } catch (error) {
    // Its text could tell what is in the state.
    if (!(error instanceof MessageError)) throw error;
  }
  throw new MessageError("state of a secure round: damaged, or of another version");
}
