/**
 * What a device remembers of a secure round, so that a reload does not end its part in it (the idea is that of
 * archipel/protocol/secagg_plus/state.py; Python's agents keep nothing of rounds over a complete graph).
 *
 * A device writes this, sealed, before it sends what a step returned. So whatever it has sent is in here: after a
 * reload it sends the same again, and never masks another vector with these masks or answers another question. What it
 * had computed and not yet written was not sent either, and is computed anew.
 */

import { type Decoder, nullable, oneOf, required, struct } from "../../bundle/decoders.js";
import type { Bytes } from "../bytes.js";
import { ConsistencyError, SecureAggregationError } from "../errors.js";
import { bytes, decode, digestText, encode, id, key, listOf, MAX_COHORT } from "../messages/fields.js";
import type { RoundPlan } from "../messages/rounds.js";
import { type Confirmation, confirmation } from "../messages/secure.js";
import type { HeldShares } from "./envelope.js";
import { KeyTree } from "./key_tree.js";
import type { Peer } from "./session.js";
import { SHARE_BYTES } from "./shamir.js";

export const STEPS = ["advertise", "share", "complain", "mask", "confirm", "unmask", "done"] as const;
export type Step = (typeof STEPS)[number];

export const LEFT = "nothing, the device left the round";

/** The longest message that a step returns, JSON. */
const MAX_SAID_BYTES = 16 << 20;
const NOTHING = new Uint8Array();

/** Of one device in one round; secrets are empty before they are made and once they are dropped. */
export class State {
  next: Step | typeof LEFT = "advertise";
  cipherSecret: Bytes = NOTHING;
  maskSecret: Bytes = NOTHING;
  envelopeSecret: Bytes = NOTHING;
  seed: Bytes = NOTHING;
  /** The public halves of its envelope keys. */
  tree = KeyTree.empty;
  /** U1: its digest, and its members in sorted order. */
  cohort = "";
  peers: ReadonlyMap<string, Peer> = new Map();
  /** This device's shares of each dealer's secrets. */
  held = new Map<string, HeldShares>();
  /** U2. */
  sharers: ReadonlySet<string> = new Set();
  /** The devices that this device accuses. */
  accused: ReadonlySet<string> = new Set();
  /** The digest of the round's complaints. */
  complaints = "";
  survivors: readonly string[] = [];
  confirmation: Confirmation | null = null;

  constructor(
    readonly round: string,
    readonly plan: string,
    readonly device: string,
  ) {}

  /** Drops all secrets. */
  forget(): void {
    this.cipherSecret = this.maskSecret = this.envelopeSecret = this.seed = NOTHING;
    this.held.clear();
  }
}

interface Written {
  readonly round_id: string;
  readonly plan: string;
  readonly device: string;
  readonly next: Step;
  readonly cipher_secret: Bytes;
  readonly mask_secret: Bytes;
  readonly envelope_secret: Bytes;
  readonly seed: Bytes;
  readonly envelope_keys: Bytes;
  readonly cohort: string | null;
  readonly peers: readonly WrittenPeer[];
  readonly held: readonly { readonly dealer: string; readonly mask_key: Bytes; readonly seed: Bytes }[];
  readonly sharers: readonly string[];
  readonly accused: readonly string[];
  readonly complaints: string | null;
  readonly survivors: readonly string[];
  readonly confirmation: Confirmation | null;
  readonly said: Bytes;
}

interface WrittenPeer {
  readonly device: string;
  readonly device_key: Bytes;
  readonly cipher_key: Bytes;
  readonly mask_key: Bytes;
  readonly envelope_root: Bytes;
}

const share = bytes(SHARE_BYTES, SHARE_BYTES);
const ids = listOf(id, MAX_COHORT);

const written: Decoder<Written> = struct<Written>({
  round_id: required(id),
  plan: required(digestText),
  device: required(id),
  next: required(oneOf(...STEPS)),
  cipher_secret: required(bytes(32)),
  mask_secret: required(bytes(32)),
  envelope_secret: required(bytes(32)),
  seed: required(bytes(32)),
  envelope_keys: required(bytes(32 * MAX_COHORT)),
  cohort: required(nullable(digestText)),
  peers: required(
    listOf(
      struct<WrittenPeer>({
        device: required(id),
        device_key: required(key),
        cipher_key: required(key),
        mask_key: required(key),
        envelope_root: required(key),
      }),
      MAX_COHORT,
    ),
  ),
  held: required(
    listOf(struct<Written["held"][number]>({
      dealer: required(id),
      mask_key: required(share),
      seed: required(share),
    }), MAX_COHORT),
  ),
  sharers: required(ids),
  accused: required(ids),
  complaints: required(nullable(digestText)),
  survivors: required(ids),
  confirmation: required(nullable(confirmation)),
  said: required(bytes(MAX_SAID_BYTES)),
});

/**
 * The state as it is kept, with what the device is about to send. It has secrets: seal it before it leaves the memory.
 * Raises SecureAggregationError where the device has left the round.
 */
export function writeState(state: State, said: Uint8Array): Bytes {
  if (state.next === LEFT) throw new SecureAggregationError(`round ${state.round}: this device has left it`);
  const peers = [...state.peers.values()].map((peer) => ({
    device: peer.deviceId,
    device_key: peer.deviceKey,
    cipher_key: peer.cipherKey,
    mask_key: peer.maskKey,
    envelope_root: peer.envelopeRoot,
  }));
  const held = [...state.held].map(([dealer, { maskKey, seed }]) => ({ dealer, mask_key: maskKey, seed }));
  return encode({
    round_id: state.round,
    plan: state.plan,
    device: state.device,
    next: state.next,
    cipher_secret: state.cipherSecret,
    mask_secret: state.maskSecret,
    envelope_secret: state.envelopeSecret,
    seed: state.seed,
    envelope_keys: state.tree.keys,
    cohort: state.cohort || null,
    peers,
    held,
    sharers: [...state.sharers],
    accused: [...state.accused],
    complaints: state.complaints || null,
    survivors: state.survivors,
    confirmation: state.confirmation,
    said,
  });
}

/**
 * What `writeState` wrote of this device in the plan's round. Raises MessageError, which shows nothing of it, or
 * ConsistencyError for another round or device.
 */
export async function readState(
  data: Uint8Array,
  plan: RoundPlan,
  planDigest: string,
  device: string,
): Promise<{ state: State; said: Bytes }> {
  const kept = decode("state of a secure round", data, written);
  if (kept.round_id !== plan.round_id || kept.plan !== planDigest || kept.device !== device) {
    throw new ConsistencyError(
      `state: it is of device ${kept.device} in round ${kept.round_id}, expected ${device} in ${plan.round_id}`,
    );
  }
  const state = new State(kept.round_id, kept.plan, kept.device);
  state.next = kept.next;
  state.cipherSecret = kept.cipher_secret;
  state.maskSecret = kept.mask_secret;
  state.envelopeSecret = kept.envelope_secret;
  state.seed = kept.seed;
  if (kept.envelope_keys.length) state.tree = await KeyTree.of(kept.envelope_keys, plan.max_cohort);
  state.cohort = kept.cohort ?? "";
  state.peers = new Map(
    kept.peers.map((peer, place) => [
      peer.device,
      {
        deviceId: peer.device,
        deviceKey: peer.device_key,
        cipherKey: peer.cipher_key,
        maskKey: peer.mask_key,
        envelopeRoot: peer.envelope_root,
        place,
      },
    ]),
  );
  state.held = new Map(kept.held.map(({ dealer, mask_key: maskKey, seed }) => [dealer, { maskKey, seed }]));
  state.sharers = new Set(kept.sharers);
  state.accused = new Set(kept.accused);
  state.complaints = kept.complaints ?? "";
  state.survivors = kept.survivors;
  state.confirmation = kept.confirmation;
  return { state, said: kept.said };
}
