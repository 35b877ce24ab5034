/**
 * What devices and server tell each other in a round over neighbours: MessagePack arrays, with columns for what there
 * is of each of many devices (archipel/protocol/secagg_plus/messages.py).
 */

import type { Bytes } from "../bytes.js";
import { MessageError } from "../errors.js";
import type { RoundPlan } from "../messages/rounds.js";
import { MAX_MEMBER_BYTES } from "./member.js";
import { bytes, type Codec, integer, listOf, pack, row, unpack } from "./msgpack.js";
import { COMMITMENT_BYTES, SHARE_BYTES } from "./shares.js";
import { MAX_DEVICES } from "./sizes.js";
import { depthOf } from "./tree.js";

export const KEY_BYTES = 32;
export const SIGNATURE_BYTES = 64;
const NONCE_BYTES = 12;
const TAG_BYTES = 16;
export const ENVELOPE_BYTES = NONCE_BYTES + 2 * SHARE_BYTES + TAG_BYTES;
/** Of one envelope and its two commitments. */
export const DEALT_BYTES = ENVELOPE_BYTES + 2 * COMMITMENT_BYTES;

// At most, in MessagePack: a number below 2^32, and what stands before bytes or a list.
const NUMBER = 5;
const HEADER = 5;
const MOST_FIELDS = 4;

/** A kind of message: how it is read and written, and how large it may be in a round of a plan. */
export interface Kind<T> {
  readonly name: string;
  readonly codec: Codec<T>;
  readonly limit: (plan: RoundPlan) => number;
}

/** The message as it is sent. */
export function write<T>(kind: Kind<T>, message: T): Bytes {
  return pack(message, kind.codec);
}

/** The message in `data`, read strictly. Raises MessageError. */
export function read<T>(kind: Kind<T>, data: Uint8Array): T {
  return unpack(kind.name, data, kind.codec);
}

const place = integer(0, MAX_DEVICES - 1);
const places = listOf(place, MAX_DEVICES);

/** The cohort as a device learns of it before it draws: how many members, their root, and its own place. */
export interface Invitation {
  readonly size: number;
  readonly root: Bytes;
  readonly place: number;
}

export const INVITATION: Kind<Invitation> = kind(
  "invitation",
  row<Invitation>({ size: integer(3, MAX_DEVICES), root: bytes(KEY_BYTES, KEY_BYTES), place }),
  () => 2 * NUMBER + KEY_BYTES,
);

/** The places of the neighbours that a device drew; the first ones also share a mask with it. */
export interface Drawn {
  readonly places: readonly number[];
}

export const DRAWN: Kind<Drawn> = kind("drawn", row<Drawn>({ places }));

/**
 * The members at the drawn places, in the order of the places, and the asking device's own; `proof` leads from all of
 * them to the root.
 */
export interface Neighbours {
  readonly members: readonly Bytes[];
  readonly proof: Bytes;
}

export const NEIGHBOURS: Kind<Neighbours> = kind(
  "neighbours",
  row<Neighbours>({
    members: listOf(bytes(MAX_MEMBER_BYTES), MAX_DEVICES),
    proof: bytes(32 * 16 * MAX_DEVICES),
  }),
  (plan) => (plan.neighbours + 1) * (HEADER + MAX_MEMBER_BYTES + depthOf(plan.max_cohort) * 32),
);

/** The neighbours that a device drew, in this order, and its envelopes for them with their commitments. */
export interface Dealt {
  readonly places: readonly number[];
  readonly dealt: Bytes;
}

export const DEALT: Kind<Dealt> = kind("dealt", row<Dealt>({ places, dealt: bytes(DEALT_BYTES * MAX_DEVICES) }));

/** What `dealers` sealed for the reader, who is at `positions` (from 1) of those that they drew. */
export interface Inbox {
  readonly dealers: readonly number[];
  readonly positions: readonly number[];
  readonly cipher_keys: Bytes;
  readonly dealt: Bytes;
}

export const INBOX: Kind<Inbox> = kind(
  "inbox",
  columns<Inbox>(
    row<Inbox>({
      dealers: places,
      positions: listOf(integer(1, MAX_DEVICES), MAX_DEVICES),
      cipher_keys: bytes(KEY_BYTES * MAX_DEVICES),
      dealt: bytes(DEALT_BYTES * MAX_DEVICES),
    }),
    "dealers",
    { positions: 1, cipher_keys: KEY_BYTES, dealt: DEALT_BYTES },
  ),
  (plan) => plan.max_cohort * (2 * NUMBER + KEY_BYTES + DEALT_BYTES),
);

/** The dealers whose envelope does not open or holds other shares than its commitments say; mostly none. */
export interface Refused {
  readonly dealers: readonly number[];
}

export const REFUSED: Kind<Refused> = kind("refused", row<Refused>({ dealers: places }));

/**
 * `gone`: those of the reader's own partners whose shares did not come, or were refused. `others`: who drew it as a
 * partner for masks, with their mask keys.
 */
export interface Partners {
  readonly gone: readonly number[];
  readonly others: readonly number[];
  readonly mask_keys: Bytes;
}

export const PARTNERS: Kind<Partners> = kind(
  "partners",
  columns<Partners>(
    row<Partners>({ gone: places, others: places, mask_keys: bytes(KEY_BYTES * MAX_DEVICES) }),
    "others",
    { mask_keys: KEY_BYTES },
  ),
  (plan) => plan.partners * NUMBER + plan.max_cohort * (NUMBER + KEY_BYTES),
);

/** Of the dealers whose shares the reader holds: those whose vectors are in the sum, and those that left. */
export interface Question {
  readonly present: readonly number[];
  readonly left: readonly number[];
}

export const QUESTION: Kind<Question> = kind(
  "question",
  row<Question>({ present: places, left: places }),
  (plan) => plan.max_cohort * NUMBER,
);

/** For each present dealer of the question the signature that it is present; empty with a semi-honest server. */
export interface Confirmed {
  readonly signatures: Bytes;
}

export const CONFIRMED: Kind<Confirmed> = kind(
  "confirmed",
  row<Confirmed>({ signatures: bytes(SIGNATURE_BYTES * MAX_DEVICES) }),
);

/** The signatures of the reader's neighbours that they take it as present. */
export interface Inclusions {
  readonly neighbours: readonly number[];
  readonly signatures: Bytes;
}

export const INCLUSIONS: Kind<Inclusions> = kind(
  "inclusions",
  columns<Inclusions>(
    row<Inclusions>({ neighbours: places, signatures: bytes(SIGNATURE_BYTES * MAX_DEVICES) }),
    "neighbours",
    { signatures: SIGNATURE_BYTES },
  ),
  (plan) => plan.neighbours * (NUMBER + SIGNATURE_BYTES),
);

export const NOBODY_SAYS: Inclusions = { neighbours: [], signatures: new Uint8Array() };

/**
 * Shares of 36 bytes in the order of the question: of the seeds of those present, of the mask keys of the rest.
 * `presence` is the device's signature that it was in the round, which proves to others that the round took place.
 */
export interface Answer {
  readonly seeds: Bytes;
  readonly mask_keys: Bytes;
  readonly presence: Bytes;
}

export const ANSWER: Kind<Answer> = kind(
  "answer",
  row<Answer>({
    seeds: bytes(SHARE_BYTES * MAX_DEVICES),
    mask_keys: bytes(SHARE_BYTES * MAX_DEVICES),
    presence: bytes(SIGNATURE_BYTES, SIGNATURE_BYTES),
  }),
);

/** `count` pieces of `size` bytes. Raises MessageError for another length. */
export function divide(what: string, data: Uint8Array, size: number, count: number): Bytes[] {
  if (data.length !== size * count) {
    throw new MessageError(`${what}: expected ${count} times ${size} bytes, got ${data.length}`);
  }
  return Array.from({ length: count }, (_, index) => new Uint8Array(data.subarray(size * index, size * (index + 1))));
}

/** `most`: bytes of what an honest server sends in a round of a plan, without the headers (secagg_plus/limits.py). */
function kind<T>(name: string, codec: Codec<T>, most: (plan: RoundPlan) => number = () => 0): Kind<T> {
  return { name, codec, limit: (plan) => (1 + MOST_FIELDS) * HEADER + most(plan) };
}

/** Refuses columns that do not have so many bytes, or numbers, for each device in column `first`. */
function columns<T extends object>(codec: Codec<T>, first: keyof T, sizes: Partial<Record<keyof T, number>>): Codec<T> {
  const lengthOf = (value: T, name: keyof T): number => (value[name] as { length: number }).length;
  return {
    write: codec.write,
    read: (from, where) => {
      const value = codec.read(from, where);
      const count = lengthOf(value, first);
      for (const [name, size] of Object.entries(sizes) as [keyof T & string, number][]) {
        const length = lengthOf(value, name);
        if (length !== size * count) from.fail(`${name}: expected ${count} times ${size}, got ${length}`, where);
      }
      return value;
    },
  };
}
