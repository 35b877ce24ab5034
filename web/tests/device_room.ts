/** Devices in one secure round, in which a server, or one of them, can put a lie in the place of any message. */

import { type Bytes, concat } from "../src/device/bytes.js";
import { agree, agreementKey, sign, type SigningKey } from "../src/device/crypto.js";
import { decode, encode } from "../src/device/messages/fields.js";
import type { Chain } from "../src/device/messages/identity.js";
import { type RoundPlan, roundPlan } from "../src/device/messages/rounds.js";
import type {
  AdvertiseRequest, Cohort, Complaints, Confirmations, EncryptedShare, Shares, Survivors,
} from "../src/device/messages/secure.js";
import { NOBODY, type Revoked } from "../src/device/revocations.js";
import { cohortDigest } from "../src/device/secagg/cohort.js";
import { associatedData, sealShares } from "../src/device/secagg/envelope.js";
import { KeyTree } from "../src/device/secagg/key_tree.js";
import { envelopeKey, roundSalt } from "../src/device/secagg/keys.js";
import { Participant } from "../src/device/secagg/participant.js";
import { chainOf, fixed, hexOf, keyOf } from "./device_world.js";

export const DIGEST = hexOf("plan");

export function roomPlan(changes: Partial<RoundPlan> = {}): RoundPlan {
  const plan = {
    round_id: hexOf("round", 16), task_id: hexOf("task", 16), number: 1, bundle: hexOf("bundle"),
    weights: hexOf("weights"), privacy: "secure", min_cohort: 3, max_cohort: 4, threshold: 3, modulus_bits: 16,
    ...changes,
  };
  return decode("plan", encode(plan), roundPlan);
}

export interface Member {
  readonly acting: Participant;
  readonly key: SigningKey;
  readonly chain: Chain;
  readonly advertised: AdvertiseRequest;
  /** What it drew, in order; the first is its cipher key's private half. */
  readonly drawn: readonly Bytes[];
}

/** A device that has advertised; the same `name` is the same device. */
export async function memberOf(
  name: string,
  plan: RoundPlan,
  { key = name, token = `token of ${name}`, attempt = "", chain, digest = DIGEST }: {
    readonly key?: string; readonly token?: string; readonly attempt?: string; readonly chain?: Chain;
    readonly digest?: string;
  } = {},
  revoked: Revoked = NOBODY,
): Promise<Member> {
  const signing = await keyOf(key);
  const drawn: Bytes[] = [];
  const draw = (count: number): Bytes => {
    drawn.push(fixed(`${name} ${token} ${attempt} ${drawn.length}`, count));
    return drawn.at(-1) as Bytes;
  };
  const own = chain ?? (await chainOf(signing, token));
  const identity = { key: signing, chain: own, enrolmentKey: (await keyOf("enrolment")).publicKey };
  const acting = await Participant.open(plan, digest, identity, revoked, draw);
  return { acting, key: signing, chain: own, advertised: await acting.advertise(), drawn };
}

type Lies = (sender: number, share: EncryptedShare) => Promise<EncryptedShare> | EncryptedShare;

export class Room {
  private constructor(
    readonly plan: RoundPlan,
    readonly members: readonly Member[],
  ) {}

  static async of(devices: number, changes: Partial<RoundPlan> = {}, revoked?: Revoked): Promise<Room> {
    const plan = roomPlan(changes);
    const names = Array.from({ length: devices }, (_, index) => `device ${index}`);
    return new Room(plan, await Promise.all(names.map((name) => memberOf(name, plan, {}, revoked))));
  }

  /** The room with another device in the place of the last. */
  with(last: Member): Room {
    return new Room(this.plan, [...this.members.slice(0, -1), last]);
  }

  id(index: number): string {
    return (this.members[index] as Member).acting.deviceId;
  }

  /** U1 as the server shows it to a member. */
  async cohort(reader: number): Promise<Cohort> {
    const sorted = this.members.map(({ acting }) => acting.deviceId).sort();
    const place = sorted.indexOf(this.id(reader));
    const keys: Cohort["keys"][number][] = [];
    for (const { acting, advertised } of this.members) {
      if (acting.deviceId === this.id(reader)) continue;
      const tree = await KeyTree.of(advertised.envelope_keys, this.plan.max_cohort);
      keys.push({ peer: acting.deviceId, key: tree.key(place), path: tree.path(place) });
    }
    const members = this.members.map(({ chain, advertised }) => ({ chain, advertisement: advertised.advertisement }));
    return { members, keys };
  }

  /** What every member deals; `lies` gives the envelope in the place of one. */
  async share(lies: Lies = (_, each) => each): Promise<Shares[]> {
    const dealt: Shares[] = [];
    for (const [index, { acting }] of this.members.entries()) {
      const { shares } = await acting.share(await this.cohort(index));
      const told: EncryptedShare[] = [];
      for (const share of shares) told.push(await lies(index, share));
      dealt.push({ shares: told });
    }
    return dealt;
  }

  inbox(reader: number, dealt: readonly Shares[]): Shares {
    const shares = dealt.flatMap(({ shares: sent }, index) => {
      const found = sent.filter(({ peer }) => peer === this.id(reader));
      return found.map((share) => ({ ...share, peer: this.id(index) }));
    });
    return { shares };
  }

  /** An envelope from one member to another that the sender really signed, over these bytes in place of two shares. */
  async envelope(sender: number, recipient: number, plain: { maskKey: Bytes; seed: Bytes }): Promise<EncryptedShare> {
    const { key, advertised, drawn } = this.members[sender] as Member;
    const { peer, key: publicKey } = (await this.cohort(sender)).keys.find(
      (each) => each.peer === this.id(recipient),
    ) as Cohort["keys"][number];
    const salt = roundSalt(this.plan.round_id, DIGEST);
    const own = JSON.parse(new TextDecoder().decode(advertised.advertisement.body)).cipher_key as string;
    const cipherKey = Uint8Array.from(atob(own), (letter) => letter.charCodeAt(0));
    const shared = await agree(await agreementKey(drawn[0] as Bytes), publicKey);
    const associated = await this.associated(sender, recipient);
    const secret = await envelopeKey(shared, salt, cipherKey, publicKey);
    const ciphertext = await sealShares(secret, fixed("nonce", 12), plain, associated);
    return { peer, ciphertext, signature: await sign(key, concat(associated, ciphertext)) };
  }

  async associated(sender: number, recipient: number): Promise<Bytes> {
    const digest = await cohortDigest(await this.cohort(0));
    return associatedData(this.plan.round_id, digest, this.id(sender), this.id(recipient));
  }

  /** All members to before `mask`; a device whose envelopes are lies is accused by those who got them. */
  async complain(lies?: Lies): Promise<Complaints[]> {
    const dealt = await this.share(lies);
    return Promise.all(this.members.map(({ acting }, index) => acting.complain(this.inbox(index, dealt))));
  }

  /** All members to before `confirm`, without complaints. */
  async mask(): Promise<void> {
    await this.complain();
    await Promise.all(this.members.map(({ acting }) => acting.mask(new Uint32Array(2), { complaints: [] })));
  }

  survivors(...indexes: readonly number[]): Survivors {
    return { devices: indexes.map((index) => this.id(index)).sort() };
  }

  /** All members to before `unmask`; what they signed. */
  async confirm(): Promise<Confirmations> {
    await this.mask();
    const survivors = this.survivors(...this.members.keys());
    const confirmations: Confirmations["confirmations"][number][] = [];
    for (const { acting } of this.members) {
      confirmations.push({ device: acting.deviceId, confirmation: await acting.confirm(survivors) });
    }
    return { confirmations };
  }
}
