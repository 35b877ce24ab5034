/**
 * A whole round of devices in TypeScript: what vectors/browser/round.json holds, which Python verifies.
 *
 * `MAKE_VECTORS=1 npx vitest run tests/device_round.test.ts` writes the file.
 */

import { createHash } from "node:crypto";
import { readFileSync, writeFileSync } from "node:fs";

import { expect, test } from "vitest";

import type { Update } from "../src/bundle/roles.js";
import { hex } from "../src/bundle/digests.js";
import type { Bytes } from "../src/device/bytes.js";
import { sign, signingKeyOf } from "../src/device/crypto.js";
import { ConsistencyError, SecureAggregationError } from "../src/device/errors.js";
import { deviceIdOf } from "../src/device/identity.js";
import { decode, encode } from "../src/device/messages/fields.js";
import type { Chain } from "../src/device/messages/identity.js";
import { roundPlan } from "../src/device/messages/rounds.js";
import type { Cohort, Complaints, Shares, Unmasking } from "../src/device/messages/secure.js";
import { NOBODY } from "../src/device/revocations.js";
import { bodyDigest, seal } from "../src/device/sealed.js";
import { cohortDigest } from "../src/device/secagg/cohort.js";
import { associatedData } from "../src/device/secagg/envelope.js";
import { KeyTree } from "../src/device/secagg/key_tree.js";
import { reduce } from "../src/device/secagg/masks.js";
import { Participant } from "../src/device/secagg/participant.js";
import { concat } from "../src/device/bytes.js";
import { Layout } from "../src/device/updates/layout.js";
import { packMasked } from "../src/device/updates/packing.js";

const FILE = new URL("../../vectors/browser/round.json", import.meta.url);
const [DEVICES, DROPPED, SPOILER, BITS] = [7, 5, 6, 16];

/** Bytes that only depend on `name`: SHAKE-256 of it. */
function fixed(name: string, count = 32): Bytes {
  const hash = createHash("shake256", { outputLength: count }).update(`archipel browser vectors: ${name}`);
  return new Uint8Array(hash.digest());
}

class Stream {
  private drawn = 0;

  constructor(private readonly name: string) {}

  readonly draw = (count: number): Bytes => {
    this.drawn += count;
    return fixed(this.name, this.drawn).slice(this.drawn - count);
  };

  get bytes(): string {
    return hex(fixed(this.name, this.drawn));
  }
}

function plain(message: object): unknown {
  return JSON.parse(new TextDecoder().decode(encode(message)));
}

const PLAN = {
  round_id: hex(fixed("round", 16)),
  task_id: hex(fixed("task", 16)),
  number: 3,
  bundle: hex(fixed("bundle")),
  weights: hex(fixed("weights")),
  privacy: "secure",
  min_cohort: 4,
  max_cohort: 8,
  threshold: 5,
  modulus_bits: BITS,
  colluders: 1,
  serial: 3,
  not_after: 2_000_000_000,
};

/** Entries of 4 and of 7 bits, which take 8 and 11 in a narrow round of eight devices. */
const UPDATES = [
  { name: "dw", tensor: "w", kind: "delta", shape: [3, 3], range: 0.5, bits: 4, weighting: "uniform" },
  { name: "m", tensor: "m", kind: "value", shape: [2], range: 1, bits: 7, weighting: "uniform" },
] as const;

async function makeRound(): Promise<object> {
  const [enrolment, server] = [await signingKeyOf(fixed("enrolment")), await signingKeyOf(fixed("server"))];
  const sealedPlan = await seal("plan", PLAN, server);
  const digest = await bodyDigest(sealedPlan);
  const plan = decode("plan", sealedPlan.body, roundPlan);
  const members = await Promise.all(
    Array.from({ length: DEVICES }, async (_, index) => {
      const key = await signingKeyOf(fixed(`device ${index}`));
      const token = await signingKeyOf(fixed(`token ${index}`));
      const certificate = { kind: "device", token_key: token.publicKey, population: "pages", not_after: 2_000_000_000 };
      const chain: Chain = {
        token: await seal("token", certificate, enrolment),
        identity: await seal("identity", { device_key: key.publicKey }, token),
      };
      const stream = new Stream(`randomness ${index}`);
      const identity = { key, chain, enrolmentKey: enrolment.publicKey };
      const acting = await Participant.open(plan, digest, identity, NOBODY, stream.draw);
      expect(acting.deviceId).toBe(await deviceIdOf(key.publicKey));
      const vector = Uint32Array.from(fixed(`vector ${index}`, 11), (byte) => byte);
      return { acting, key, chain, stream, vector, advertised: await acting.advertise() };
    }),
  );
  const cohort: Cohort = {
    members: members.map(({ chain, advertised }) => ({ chain, advertisement: advertised.advertisement })),
    keys: [],
  };
  const trees = new Map<string, KeyTree>();
  for (const { acting, advertised } of members) {
    trees.set(acting.deviceId, await KeyTree.of(advertised.envelope_keys, plan.max_cohort));
  }
  const sorted = [...trees.keys()].sort();
  const keysFor = (reader: string): Cohort["keys"] =>
    sorted
      .filter((peer) => peer !== reader)
      .map((peer) => {
        const [tree, place] = [trees.get(peer) as KeyTree, sorted.indexOf(reader)];
        return { peer, key: tree.key(place), path: tree.path(place) };
      });
  const shares: Shares[] = [];
  for (const { acting } of members) shares.push(await acting.share({ ...cohort, keys: keysFor(acting.deviceId) }));
  // The last device signs an envelope for the first that does not open.
  const [first, spoiler] = [members[0]!.acting.deviceId, members[SPOILER]!];
  const session = await cohortDigest(cohort);
  const associated = associatedData(PLAN.round_id, session, spoiler.acting.deviceId, first);
  shares[SPOILER] = {
    shares: await Promise.all(
      shares[SPOILER]!.shares.map(async (share) => {
        if (share.peer !== first) return share;
        const ciphertext = share.ciphertext.map((byte, index) => (index === 30 ? byte ^ 1 : byte));
        return { ...share, ciphertext, signature: await sign(spoiler.key, concat(associated, ciphertext)) };
      }),
    ),
  };
  const inbox = (recipient: string): Shares => ({
    shares: members.flatMap(({ acting }, index) => {
      const sent = shares[index]!.shares.filter(({ peer }) => peer === recipient);
      return sent.map((share) => ({ ...share, peer: acting.deviceId }));
    }),
  });
  const complained: Complaints[] = [];
  for (const { acting } of members.slice(0, SPOILER)) complained.push(await acting.complain(inbox(acting.deviceId)));
  const complaints = complained[0]!;
  const masked: Uint32Array[] = [];
  for (const { acting, vector } of members.slice(0, DROPPED)) masked.push(await acting.mask(vector, complaints));
  const present = members.slice(0, DROPPED);
  const survivors = { devices: present.map(({ acting }) => acting.deviceId).sort() };
  const confirmations = { confirmations: [] as { device: string; confirmation: Awaited<ReturnType<typeof seal>> }[] };
  for (const { acting } of present) {
    confirmations.confirmations.push({ device: acting.deviceId, confirmation: await acting.confirm(survivors) });
  }
  const answers: Unmasking[] = [];
  for (const { acting } of present) answers.push(await acting.unmask(confirmations));
  // Every step is made once, whatever comes.
  await expect(members[0]!.acting.unmask(confirmations)).rejects.toThrow(SecureAggregationError);
  const total = new Uint32Array(11);
  for (const vector of masked) for (let index = 0; index < 11; index++) total[index]! += vector[index]!;
  reduce(total, BITS);
  const defaults = { clip: null, lowest: 0, noise: 0, mean: "", carries: null } as const;
  const given = { role: "update", dtype: "float32", ...defaults } as const;
  const layout = new Layout(UPDATES.map((port): Update => ({ ...given, ...port })));
  const narrow = packMasked(layout, masked[0]!, { ...plan, narrow: true });
  return {
    enrolment_key: hex(enrolment.publicKey),
    server_key: hex(server.publicKey),
    sealed_plan: plain(sealedPlan),
    plan_digest: digest,
    devices: members.map(({ acting, chain, stream, vector, advertised }, index) => ({
      device_id: acting.deviceId,
      identity_seed: hex(fixed(`device ${index}`)),
      randomness: stream.bytes,
      chain: plain(chain),
      advertisement: plain(advertised.advertisement),
      envelope_keys: hex(advertised.envelope_keys),
      cohort_keys: plain([...keysFor(acting.deviceId)]),
      shares: plain(shares[index]!),
      inbox: plain(inbox(acting.deviceId)),
      complaints: index < SPOILER ? plain(complained[index]!) : null,
      vector: [...vector],
      masked: index < DROPPED ? [...masked[index]!] : null,
      answer: index < DROPPED ? plain(answers[index]!) : null,
    })),
    cohort: { members: plain([...cohort.members]) },
    complaints: plain(complaints),
    survivors,
    confirmations: plain(confirmations),
    masked_sum: [...total],
    updates: UPDATES.map((port) => ({ role: "update", dtype: "float32", ...port })),
    packed: hex(packMasked(layout, masked[0]!, plan)),
    packed_narrow: hex(narrow),
  };
}

test("the committed round is what these devices make", async () => {
  const made = `${JSON.stringify(await makeRound(), null, 1)}\n`;
  if (process.env.MAKE_VECTORS === "1") writeFileSync(FILE, made);
  const same = readFileSync(FILE, "utf8") === made;
  expect(same, "vectors/browser/round.json is stale: run with MAKE_VECTORS=1").toBe(true);
});

test("a device leaves after a step that failed, and takes none out of order", async () => {
  const server = await signingKeyOf(fixed("server"));
  const sealedPlan = await seal("plan", PLAN, server);
  const [enrolment, token] = [await signingKeyOf(fixed("enrolment")), await signingKeyOf(fixed("token 0"))];
  const key = await signingKeyOf(fixed("device 0"));
  const certificate = { kind: "device", token_key: token.publicKey, population: "pages", not_after: 2_000_000_000 };
  const chain = {
    token: await seal("token", certificate, enrolment),
    identity: await seal("identity", { device_key: key.publicKey }, token),
  };
  const plan = decode("plan", sealedPlan.body, roundPlan);
  const identity = { key, chain, enrolmentKey: enrolment.publicKey };
  const acting = await Participant.open(plan, await bodyDigest(sealedPlan), identity, NOBODY);
  await expect(acting.mask(new Uint32Array(1), { complaints: [] })).rejects.toThrow("step mask in round");
  await acting.advertise();
  await expect(acting.advertise()).rejects.toThrow("expected share");
  await expect(acting.share({ members: [], keys: [] })).rejects.toThrow(ConsistencyError);
  await expect(acting.share({ members: [], keys: [] })).rejects.toThrow("expected nothing, the device left the round");
  // A plan in which nobody hides this device, and a draw that is too short.
  const alone = Participant.open({ ...plan, min_cohort: 2 }, "0".repeat(64), identity, NOBODY);
  await expect(alone).rejects.toThrow("at least 3");
  const short = await Participant.open(plan, "0".repeat(64), identity, NOBODY, () => new Uint8Array(8));
  await expect(short.advertise()).rejects.toThrow("asked for 32 bytes, got 8");
});
