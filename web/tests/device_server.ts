/** A server of one secure round with real peers, for a whole agent. */

import { expect } from "vitest";

import { required, struct } from "../src/bundle/decoders.js";
import { hex } from "../src/bundle/digests.js";
import { type Bundle } from "../src/bundle/reader.js";
import { writeWeights } from "../src/bundle/weights.js";
import type { Bytes } from "../src/device/bytes.js";
import { agree, agreementKey, publicKeyOf } from "../src/device/crypto.js";
import { readDeviceId } from "../src/device/identity.js";
import { bytes, decode, encode, id, listOf, MAX_COHORT } from "../src/device/messages/fields.js";
import { type Chain, chain, type Sealed, sealed } from "../src/device/messages/identity.js";
import { type Phase, type RoundPlan, roundPlan } from "../src/device/messages/rounds.js";
import {
  type AdvertiseRequest, type Cohort, type Complaints, complaints, type Confirmations, type Shares, shares,
  type Survivors, type Unmasking,
} from "../src/device/messages/secure.js";
import { bodyDigest, seal } from "../src/device/sealed.js";
import { KeyTree } from "../src/device/secagg/key_tree.js";
import { pairwiseMaskKey, roundSalt, selfMaskKey } from "../src/device/secagg/keys.js";
import { applyMask, pairwiseSign, reduce } from "../src/device/secagg/masks.js";
import { reconstruct } from "../src/device/secagg/shamir.js";
import { type Member, memberOf } from "./device_room.js";
import { fixed, keyOf, MODEL, planOf, problem } from "./device_world.js";

const enrolling = struct<{ chain: Chain; proof: Sealed }>({ chain: required(chain), proof: required(sealed) });
const advertising = struct<AdvertiseRequest>({
  advertisement: required(sealed),
  envelope_keys: required(bytes(32 * MAX_COHORT)),
});
const confirming = struct<{ confirmation: Sealed }>({ confirmation: required(sealed) });
const revealed = listOf(struct({ device: required(id), share: required(bytes(33, 33)) }), MAX_COHORT);
const unmasking = struct<Unmasking>({ self_seeds: required(revealed), mask_keys: required(revealed) });

/** What a server shows of what its devices said; a lie is in the place of one of them. */
export interface Shown {
  cohort: Cohort;
  shares: Shares;
  complaints: Complaints;
  survivors: Survivors;
  confirmations: Confirmations;
}
export type Lies = { [K in keyof Shown]?: (honest: Shown[K]) => Shown[K] | Promise<Shown[K]> };

/** The numbers of its plan. */
export const SMALL = { min_cohort: 4, max_cohort: 5, threshold: 4, colluders: 1 };

/** The round has the agent and four peers, of which the last drops out after it has dealt its shares. */
export class RoundServer {
  phase: Phase = "advertising";
  lies: Lies = {};
  /** Whether the plan is given out; the agent takes part in one round. */
  assigns = true;
  /** Whether it takes another answer to a question that was answered. */
  greedy = false;
  left = 0;
  /** What the agent sent to each path: every body that is another one. */
  readonly said = new Map<string, Bytes[]>();
  /** How often it sent it. */
  readonly sent = new Map<string, number>();
  readonly asked = new Map<string, number>();
  private agent: { id: string; chain: Chain; advertised: AdvertiseRequest | null } | null = null;
  private readonly dealt = new Map<string, Shares>();
  readonly masked = new Map<string, Uint32Array>();
  private readonly confirmed = new Map<string, Sealed>();
  private readonly answers = new Map<string, Unmasking>();

  private constructor(
    readonly bundle: Bundle,
    readonly plan: RoundPlan,
    private readonly sealedPlan: Sealed,
    readonly digest: string,
    readonly peers: readonly Member[],
    readonly vectors: readonly Uint32Array[],
  ) {}

  static async of(bundle: Bundle, length: number, changes: object = {}): Promise<RoundServer> {
    const sealedPlan = await seal("plan", await planOf(bundle, { ...SMALL, ...changes }), await keyOf("server"));
    const plan = decode("plan", sealedPlan.body, roundPlan);
    const digest = await bodyDigest(sealedPlan);
    const names = ["peer 0", "peer 1", "peer 2", "peer 3"];
    const peers = await Promise.all(names.map((name) => memberOf(name, plan, { digest })));
    const vectors = names.map((_, peer) => Uint32Array.from({ length }, (_, index) => (peer + 1) * (index + 7)));
    return new RoundServer(bundle, plan, sealedPlan, digest, peers, vectors);
  }

  readonly fetch = async (input: RequestInfo | URL, init: RequestInit = {}): Promise<Response> => {
    const { pathname } = new URL(String(input));
    const body = (init.body ?? new Uint8Array()) as Bytes;
    const answer = await this.answer(init.method ?? "GET", pathname, body);
    const headers = { Date: new Date().toUTCString() };
    if (answer !== null) return new Response(answer instanceof Uint8Array ? answer : encode(answer), { headers });
    return new Response(encode(problem(410, "none")), { status: 410, headers });
  };

  get survivors(): Survivors {
    return { devices: [this.agentId, ...this.peers.slice(0, 3).map(({ acting }) => acting.deviceId)].sort() };
  }

  get agentId(): string {
    return this.agent?.id ?? "";
  }

  private async answer(method: string, path: string, body: Bytes): Promise<object | Bytes | null> {
    const now = Date.now() / 1000;
    if (path === "/v1/devices") {
      const request = decode("enrolment", body, enrolling);
      this.agent = { id: await readDeviceId(request.chain), chain: request.chain, advertised: null };
      return { device_id: this.agentId };
    }
    if (path === "/v1/challenges") return { nonce: fixed("nonce"), expires: now + 60 };
    if (path === "/v1/sessions") return { token: "t", expires: now + 900 };
    if (path === "/v1/check-ins") return { retry_after: 0.01, ...(this.assigns ? { plan: this.sealedPlan } : {}) };
    if (path === `/v1/bundles/${this.bundle.digest}`) return MODEL.bundle as Bytes;
    if (path === `/v1/blobs/${this.plan.weights}`) return writeWeights(this.bundle.parameters()) as Bytes;
    const [, round, what = ""] = /^\/v1\/rounds\/([0-9a-f]{32})\/?(.*)$/.exec(path) ?? [];
    if (round !== this.plan.round_id) return null;
    if (what === "") return this.status();
    if (what === "leave") return { stored: ++this.left > 0 };
    if (method === "GET") return this.show(what as keyof Shown);
    return (await this.take(what, body)) ? {} : null;
  }

  private async status(): Promise<object> {
    const { complaints: list } = await this.shown(this.agentId);
    const told = (await this.lies.complaints?.(list)) ?? list;
    const standing = { phase: this.phase, phase_ends: Date.now() / 1000 + 60, retry_after: 0.01 };
    return { round_id: this.plan.round_id, ...standing, complaints: told.complaints.length };
  }

  private async show(what: keyof Shown): Promise<object> {
    this.asked.set(what, (this.asked.get(what) ?? 0) + 1);
    const honest = await this.shown(this.agentId);
    const lie = this.lies[what] as ((honest: object) => object) | undefined;
    return lie === undefined ? honest[what] : lie(honest[what]);
  }

  /** What an honest server shows to a device now. */
  async shown(reader: string): Promise<Shown> {
    const confirmed = [...this.confirmed].map(([device, confirmation]) => ({ device, confirmation }));
    const inbox = [...this.dealt].flatMap(([sender, { shares: dealt }]) =>
      dealt.filter(({ peer }) => peer === reader).map((share) => ({ ...share, peer: sender })),
    );
    return {
      cohort: await this.cohort(reader),
      shares: { shares: inbox },
      complaints: { complaints: [] },
      survivors: this.survivors,
      confirmations: { confirmations: confirmed },
    };
  }

  /** U1, or so many of the peers with the agent, as the server shows it to a device. */
  async cohort(reader: string, peers = this.peers.length): Promise<Cohort> {
    const members = this.members(peers);
    const place = members.map((member) => member.id).sort().indexOf(reader);
    const keys: Cohort["keys"][number][] = [];
    for (const { id: peer, advertised } of members) {
      if (peer === reader) continue;
      const tree = await KeyTree.of(advertised.envelope_keys, this.plan.max_cohort);
      keys.push({ peer, key: tree.key(place), path: tree.path(place) });
    }
    const shown = members.map(({ chain: of, advertised }) => ({ chain: of, advertisement: advertised.advertisement }));
    return { members: shown, keys };
  }

  private members(peers = this.peers.length): { id: string; chain: Chain; advertised: AdvertiseRequest }[] {
    const theirs = this.peers.slice(0, peers).map(({ acting, ...member }) => ({ ...member, id: acting.deviceId }));
    const { agent } = this;
    return agent?.advertised ? [{ ...agent, advertised: agent.advertised }, ...theirs] : theirs;
  }

  /** Store what the agent sends, once; with the peers' part of the phase the next one begins. False: another body. */
  private async take(what: string, body: Bytes): Promise<boolean> {
    this.sent.set(what, (this.sent.get(what) ?? 0) + 1);
    const before = this.said.get(what) ?? [];
    if (before.some((each) => hex(each) === hex(body))) return true;
    this.said.set(what, [...before, body]);
    if (before.length) return this.greedy;
    await this.taking[what]?.(body);
    return true;
  }

  private readonly taking: Readonly<Record<string, (body: Bytes) => Promise<void>>> = {
    advertisement: async (body) => {
      (this.agent as NonNullable<typeof this.agent>).advertised = decode("advertisement", body, advertising);
      this.phase = "sharing";
    },
    shares: async (body) => {
      this.dealt.set(this.agentId, decode("shares", body, shares));
      for (const { acting } of this.peers) {
        this.dealt.set(acting.deviceId, await acting.share(await this.cohort(acting.deviceId)));
      }
      this.phase = "complaining";
    },
    complaints: async (body) => {
      decode("complaints", body, complaints);
      for (const { acting } of this.peers) await acting.complain((await this.shown(acting.deviceId)).shares);
      this.phase = "masking";
    },
    update: async (body) => {
      const bits = this.plan.modulus_bits / 8;
      const length = body.length / bits;
      const entry = (at: number): number => (body[at]! | (body[at + 1]! << 8) | (body[at + 2]! << 16)) >>> 0;
      this.masked.set(this.agentId, Uint32Array.from({ length }, (_, index) => entry(bits * index)));
      for (const [index, { acting }] of this.peers.slice(0, 3).entries()) {
        const vector = this.vectors[index] as Uint32Array;
        this.masked.set(acting.deviceId, await acting.mask(vector, { complaints: [] }));
      }
      this.phase = "confirming";
    },
    confirmation: async (body) => {
      this.confirmed.set(this.agentId, decode("confirmation", body, confirming).confirmation);
      for (const { acting } of this.peers.slice(0, 3)) {
        this.confirmed.set(acting.deviceId, await acting.confirm(this.survivors));
      }
      this.phase = "unmasking";
    },
    unmasking: async (body) => {
      this.answers.set(this.agentId, decode("unmasking", body, unmasking));
      const { confirmations } = await this.shown("");
      for (const { acting } of this.peers.slice(0, 3)) {
        this.answers.set(acting.deviceId, await acting.unmask(confirmations));
      }
      this.phase = "committed";
    },
  };

  /** What the agent's update was: the sum, without every mask and without the peers' vectors. */
  async update(): Promise<Uint32Array> {
    const sum = new Uint32Array((this.vectors[0] as Uint32Array).length);
    for (const masked of this.masked.values()) sum.forEach((entry, index) => (sum[index] = entry + masked[index]!));
    const salt = roundSalt(this.plan.round_id, this.digest);
    const everybody = this.members().map((member) => member.id).sort();
    const maskKeys = new Map(
      this.members().map(({ id: device, advertised }) => {
        const said = new TextDecoder().decode(advertised.advertisement.body);
        return [device, Uint8Array.from(atob(JSON.parse(said).mask_key), (letter) => letter.charCodeAt(0))] as const;
      }),
    );
    const secretOf = (device: string, kind: keyof Unmasking): Bytes =>
      reconstruct(
        [...this.answers].map(([holder, answer]) => [
          everybody.indexOf(holder) + 1,
          answer[kind].find((each) => each.device === device)!.share,
        ]),
        this.plan.threshold,
      );
    for (const survivor of this.survivors.devices) {
      await applyMask(sum, await selfMaskKey(secretOf(survivor, "self_seeds"), salt, maskKeys.get(survivor)!), -1);
    }
    const dropped = (this.peers[3] as Member).acting.deviceId;
    const secret = secretOf(dropped, "mask_keys");
    const mine = maskKeys.get(dropped)!;
    expect(await publicKeyOf(secret)).toEqual(mine);
    for (const survivor of this.survivors.devices) {
      const theirs = maskKeys.get(survivor)!;
      const key = await pairwiseMaskKey(await agree(await agreementKey(secret), theirs), salt, mine, theirs);
      // As the survivor had added it, with the other sign.
      await applyMask(sum, key, pairwiseSign(dropped, survivor));
    }
    for (const vector of this.vectors.slice(0, 3)) sum.forEach((entry, index) => (sum[index] = entry - vector[index]!));
    reduce(sum, this.plan.modulus_bits);
    return sum;
  }
}
