/** A server of one secure round over neighbours with real peers, for a whole agent. */

import { hex } from "../src/bundle/digests.js";
import { type Bundle, openBundle } from "../src/bundle/reader.js";
import { writeWeights } from "../src/bundle/weights.js";
import { required, struct } from "../src/bundle/decoders.js";
import type { Bytes } from "../src/device/bytes.js";
import { agree, agreementKey } from "../src/device/crypto.js";
import { readDeviceId } from "../src/device/identity.js";
import { decode, encode } from "../src/device/messages/fields.js";
import { type Chain, chain, type Sealed, sealed } from "../src/device/messages/identity.js";
import { type Phase, type RoundPlan, roundPlan } from "../src/device/messages/rounds.js";
import { NOBODY } from "../src/device/revocations.js";
import { bodyDigest, seal } from "../src/device/sealed.js";
import { pairwiseMaskKey, roundSalt, selfMaskKey } from "../src/device/secagg/keys.js";
import { applyMask, reduce } from "../src/device/secagg/masks.js";
import {
  ANSWER, type Answer, CONFIRMED, DEALT, DRAWN, INBOX, INCLUSIONS, INVITATION, type Kind, NEIGHBOURS, PARTNERS,
  QUESTION, read, REFUSED, write,
} from "../src/device/secagg_plus/messages.js";
import { Participant } from "../src/device/secagg_plus/participant.js";
import { SHARE_BYTES } from "../src/device/secagg_plus/shares.js";
import type { Sizes } from "../src/device/secagg_plus/sizes.js";
import { termsOf } from "../src/device/secagg_plus/terms.js";
import { layoutOf } from "./device_tab.js";
import { chainOf, fixed, keyOf, MODEL, planOf, problem, PUBLISHER } from "./device_world.js";
import { withManifest } from "./forge.js";
import { NeighbourRoom } from "./neighbour_room.js";

const PEERS = 6;
const enrolling = struct<{ chain: Chain; proof: Sealed }>({ chain: required(chain), proof: required(sealed) });
const SIZES = { neighbours: 5, threshold: 4, partners: 5 };
/** What the server answers to a device's questions, and the kinds of these messages. */
const SHOWN = {
  invitation: INVITATION, neighbours: NEIGHBOURS, inbox: INBOX, partners: PARTNERS, question: QUESTION,
  inclusions: INCLUSIONS,
} as Readonly<Record<string, Kind<unknown>>>;

interface Peer {
  readonly acting: Participant;
  readonly member: Bytes;
  /** Its mask key's private half, and the seed of its own mask. */
  readonly secrets: { readonly maskKey: Bytes; readonly seed: Bytes };
  readonly vector: Uint32Array;
}

/** The round has the agent and six peers, of which the last in the order of ids leaves after it has dealt its shares. */
export class NeighbourServer {
  phase: Phase = "advertising";
  /** What the server says in place of what is true, by the question's path. */
  lies: Readonly<Record<string, (honest: never) => unknown>> = {};
  assigns = true;
  left = 0;
  /** What the agent sent to each path: every body that is another one. */
  readonly said = new Map<string, Bytes[]>();
  readonly sent = new Map<string, number>();
  room = null as never as NeighbourRoom;
  /** The agent's place. */
  own = -1;
  readonly masked = new Map<number, Uint32Array>();
  readonly answers = new Map<number, Answer>();
  private agentId = "";
  private peersAt = new Map<number, Peer>();

  private constructor(
    readonly bundle: Bundle,
    private readonly file: Bytes,
    readonly plan: RoundPlan,
    private readonly sealedPlan: Sealed,
    readonly digest: string,
    readonly sizes: Sizes,
    private readonly peers: readonly Peer[],
  ) {}

  /** `server`: what the bundle's policy takes the server to be. */
  static async of(server: "malicious" | "semi-honest" = "malicious", changes: object = {}): Promise<NeighbourServer> {
    const file = await withManifest(MODEL.bundle, ({ privacy }) => {
      Object.assign(privacy, { protocols: ["neighbours"], colluders: 0.001 });
      if (server !== "malicious") privacy.server = server;
    });
    const bundle = await openBundle(file, PUBLISHER, true);
    const numbers = { min_cohort: 5, max_cohort: PEERS + 1, colluders: 0, protocol: "neighbours", ...SIZES, ...changes };
    const sealedPlan = await seal("plan", await planOf(bundle, numbers), await keyOf("server"));
    const plan = decode("plan", sealedPlan.body, roundPlan);
    const digest = await bodyDigest(sealedPlan);
    const terms = termsOf(plan, digest, bundle.manifest.privacy);
    const enrolmentKey = (await keyOf("enrolment")).publicKey;
    const { length } = layoutOf(bundle);
    const peers = await Promise.all(
      Array.from({ length: PEERS }, async (_, index): Promise<Peer> => {
        const key = await keyOf(`peer ${index}`);
        const drawn: Bytes[] = [];
        const draw = (count: number): Bytes => {
          drawn.push(fixed(`peer ${index} draws ${drawn.length}`, count));
          return drawn.at(-1) as Bytes;
        };
        const identity = { key, chain: await chainOf(key, `token of peer ${index}`), enrolmentKey };
        const acting = await Participant.open(terms, identity, NOBODY, draw);
        const member = await acting.advertise();
        const vector = Uint32Array.from({ length }, (_each, at) => (index + 1) * (at + 7));
        return { acting, member, secrets: { maskKey: drawn[1]!, seed: drawn[2]! }, vector };
      }),
    );
    peers.sort((one, other) => (one.acting.deviceId < other.acting.deviceId ? -1 : 1));
    return new NeighbourServer(bundle, file as Bytes, plan, sealedPlan, digest, SIZES, peers);
  }

  readonly fetch = async (input: RequestInfo | URL, init: RequestInit = {}): Promise<Response> => {
    const { pathname } = new URL(String(input));
    const answer = await this.answer(init.method ?? "GET", pathname, (init.body ?? new Uint8Array()) as Bytes);
    const headers = { Date: new Date().toUTCString() };
    if (answer !== null) return new Response(answer instanceof Uint8Array ? answer : encode(answer), { headers });
    return new Response(encode(problem(410, "none")), { status: 410, headers });
  };

  private async answer(method: string, path: string, body: Bytes): Promise<object | Bytes | null> {
    const now = Date.now() / 1000;
    if (path === "/v1/devices") {
      this.agentId = await readDeviceId(decode("enrolment", body, enrolling).chain);
      return { device_id: this.agentId };
    }
    if (path === "/v1/challenges") return { nonce: fixed("nonce"), expires: now + 60 };
    if (path === "/v1/sessions") return { token: "t", expires: now + 900 };
    if (path === "/v1/check-ins") return { retry_after: 0.01, ...(this.assigns ? { plan: this.sealedPlan } : {}) };
    if (path === `/v1/bundles/${this.bundle.digest}`) return this.file;
    if (path === `/v1/blobs/${this.plan.weights}`) return writeWeights(this.bundle.parameters()) as Bytes;
    const [, round, what = ""] = /^\/v1\/rounds\/([0-9a-f]{32})\/?(.*)$/.exec(path) ?? [];
    if (round !== this.plan.round_id) return null;
    const standing = { phase: this.phase, phase_ends: now + 60, retry_after: 0.01 };
    if (what === "") return { round_id: this.plan.round_id, ...standing };
    if (what === "leave") return { stored: ++this.left > 0 };
    if (method === "PUT") return (await this.take(what, body)) ? {} : null;
    const kind = SHOWN[what];
    if (kind === undefined) return null;
    if (what === "neighbours") await this.take("drawn", body);
    const honest = this.show(what, body);
    return write(kind, this.lies[what] === undefined ? honest : this.lies[what](honest as never));
  }

  /** What an honest server shows to the agent now. */
  private show(what: string, body: Bytes): unknown {
    const { room, own } = this;
    if (what === "invitation") return room.invitation(own);
    if (what === "neighbours") return room.introduce(own, read(DRAWN, body).places);
    if (what === "inbox") return room.inbox(own);
    if (what === "partners") return room.partners(own);
    if (what === "question") return room.question(own, this.survivors);
    return room.inclusions(own);
  }

  /** Everybody but the last peer. */
  get survivors(): Set<number> {
    const leaver = Math.max(...this.peersAt.keys());
    return new Set([...Array(PEERS + 1).keys()].filter((place) => place !== leaver));
  }

  /** Store what the agent sends, once; with the peers' part of the phase the next one begins. False: another body. */
  private async take(what: string, body: Bytes): Promise<boolean> {
    this.sent.set(what, (this.sent.get(what) ?? 0) + 1);
    const before = this.said.get(what) ?? [];
    if (before.some((each) => hex(each) === hex(body))) return true;
    this.said.set(what, [...before, body]);
    if (before.length) return false;
    await this.taking[what]?.(body);
    return true;
  }

  private readonly taking: Readonly<Record<string, (body: Bytes) => Promise<void>>> = {
    member: async (body) => {
      const members = new Map(this.peers.map(({ acting, member }) => [acting.deviceId, member]));
      members.set(this.agentId, body);
      const ids = [...members.keys()].sort();
      this.room = await NeighbourRoom.with(ids.map((id) => members.get(id) as Bytes), this.sizes);
      this.own = ids.indexOf(this.agentId);
      this.peersAt = new Map(this.peers.map((peer) => [ids.indexOf(peer.acting.deviceId), peer]));
      this.phase = "sharing";
    },
    dealt: async (body) => {
      const dealt = read(DEALT, body);
      [this.room.dealt[this.own], this.room.drawn[this.own]] = [dealt, dealt.places];
      for (const [place, { acting }] of this.peersAt) {
        const { places } = await acting.draw(this.room.invitation(place));
        this.room.dealt[place] = await acting.deal(this.room.introduce(place, places));
        this.room.drawn[place] = places;
      }
      this.phase = "complaining";
    },
    refused: async (body) => {
      this.room.refused[this.own] = read(REFUSED, body);
      for (const [place, { acting }] of this.peersAt) {
        this.room.refused[place] = await acting.receive(this.room.inbox(place));
      }
      this.phase = "masking";
    },
    update: async (body) => {
      const width = this.plan.modulus_bits / 8;
      const entry = (at: number): number => (body[at]! | (body[at + 1]! << 8) | (body[at + 2]! << 16)) >>> 0;
      const length = body.length / width;
      this.masked.set(this.own, Uint32Array.from({ length }, (_, index) => entry(width * index)));
      for (const [place, { acting, vector }] of this.presentPeers) {
        this.masked.set(place, await acting.mask(vector, this.room.partners(place)));
      }
      this.phase = "confirming";
    },
    inclusions: async (body) => {
      this.room.questions.set(this.own, this.room.question(this.own, this.survivors));
      this.room.confirmed.set(this.own, read(CONFIRMED, body));
      for (const [place, { acting }] of this.presentPeers) {
        const question = this.room.question(place, this.survivors);
        this.room.questions.set(place, question);
        this.room.confirmed.set(place, await acting.confirm(question));
      }
      this.phase = "unmasking";
    },
    answer: async (body) => {
      this.answers.set(this.own, read(ANSWER, body));
      for (const [place, { acting }] of this.presentPeers) {
        const question = this.room.questions.get(place)!;
        this.answers.set(place, await acting.answer(question, this.room.inclusions(place)));
      }
      this.phase = "committed";
    },
  };

  private get presentPeers(): [number, Peer][] {
    return [...this.peersAt].filter(([place]) => this.survivors.has(place));
  }

  /** What the agent's update was: the sum, without every mask and without the peers' vectors. */
  async update(): Promise<Uint32Array> {
    const { room } = this;
    const sum = new Uint32Array(this.peers[0]!.vector.length);
    for (const masked of this.masked.values()) sum.forEach((entry, index) => (sum[index] = entry + masked[index]!));
    const salt = roundSalt(this.plan.round_id, this.digest);
    for (const place of this.survivors) {
      const seed = place === this.own ? this.agentSeed() : this.peersAt.get(place)!.secrets.seed;
      await applyMask(sum, await selfMaskKey(seed, salt, room.keysOf(place).maskKey), -1);
    }
    const gone = Math.max(...this.peersAt.keys());
    const [mine, secret] = [room.keysOf(gone).maskKey, await agreementKey(this.peersAt.get(gone)!.secrets.maskKey)];
    for (const place of this.survivors) {
      if (!room.drawn[gone]!.includes(place) && !room.drawn[place]!.includes(gone)) continue;
      const theirs = room.keysOf(place).maskKey;
      const key = await pairwiseMaskKey(await agree(secret, theirs), salt, mine, theirs);
      // As the survivor had added it, with the other sign.
      await applyMask(sum, key, place > gone ? -1 : 1);
    }
    for (const [, { vector }] of this.presentPeers) sum.forEach((entry, index) => (sum[index] = entry - vector[index]!));
    reduce(sum, this.plan.modulus_bits);
    return sum;
  }

  /** The seed of the agent's mask, from the shares that its holders showed. */
  private agentSeed(): Bytes {
    const points = this.room.drawn[this.own]!.flatMap((holder, index): [bigint, Bytes][] => {
      const at = this.room.questions.get(holder)?.present.indexOf(this.own) ?? -1;
      if (at < 0) return [];
      return [[BigInt(index + 1), this.answers.get(holder)!.seeds.slice(SHARE_BYTES * at, SHARE_BYTES * (at + 1))]];
    }).slice(0, this.sizes.threshold);
    const prime = 2n ** 31n - 1n;
    const inverse = (of: bigint): bigint => {
      let [result, power] = [1n, ((of % prime) + prime) % prime];
      for (let rest = prime - 2n; rest; rest >>= 1n, power = (power * power) % prime) {
        if (rest & 1n) result = (result * power) % prime;
      }
      return result;
    };
    let number = 0n;
    for (let element = 8; element >= 0; element--) {
      let value = 0n;
      for (const [x, share] of points) {
        let term = BigInt(new DataView(share.buffer).getUint32(4 * element, true));
        // Lagrange's polynomial at 0.
        for (const [other] of points) if (other !== x) term = (term * other * inverse(other - x)) % prime;
        value = (value + term) % prime;
      }
      number = (number << 30n) | value;
    }
    return Uint8Array.from({ length: 32 }, (_, index) => Number((number >> BigInt(8 * index)) & 0xffn));
  }
}
