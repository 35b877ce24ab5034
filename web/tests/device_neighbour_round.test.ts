/**
 * A whole round over neighbours of devices in TypeScript: what vectors/browser/neighbours.json holds, which Python
 * verifies.
 *
 * `MAKE_VECTORS=1 npx vitest run tests/device_neighbour_round.test.ts` writes the file.
 */

import { readFileSync, writeFileSync } from "node:fs";

import { expect, test } from "vitest";

import type { PrivacyPolicy } from "../src/bundle/manifest.js";
import { hex } from "../src/bundle/digests.js";
import { signingKeyOf } from "../src/device/crypto.js";
import { decode, encode } from "../src/device/messages/fields.js";
import { roundPlan } from "../src/device/messages/rounds.js";
import { NOBODY } from "../src/device/revocations.js";
import { bodyDigest, seal } from "../src/device/sealed.js";
import { reduce } from "../src/device/secagg/masks.js";
import {
  ANSWER, CONFIRMED, DEALT, DRAWN, INBOX, INCLUSIONS, INVITATION, type Kind, NEIGHBOURS, PARTNERS, QUESTION, REFUSED,
  write,
} from "../src/device/secagg_plus/messages.js";
import { Participant } from "../src/device/secagg_plus/participant.js";
import { termsOf } from "../src/device/secagg_plus/terms.js";
import { chainOf, fixed, hexOf, keyOf, POPULATION } from "./device_world.js";
import { NeighbourRoom } from "./neighbour_room.js";

const FILE = new URL("../../vectors/browser/neighbours.json", import.meta.url);
const [DEVICES, BITS, LENGTH, REPLAYED] = [10, 20, 7, 4];
/** One of ten may be corrupt. */
const POLICY = { colluders: 0.12, dropouts: 0.2, server: "malicious", min_cohort: 3 } as const;
const PLAN = {
  round_id: hexOf("round over neighbours", 16), task_id: hexOf("task", 16), number: 2, bundle: hexOf("bundle"),
  weights: hexOf("weights"), privacy: "secure", min_cohort: 4, max_cohort: DEVICES, threshold: 6, modulus_bits: BITS,
  colluders: 1, serial: 2, not_after: 2_000_000_000, protocol: "neighbours", neighbours: 8, partners: 8,
};

function plain(message: object): unknown {
  return JSON.parse(new TextDecoder().decode(encode(message)));
}

async function makeRound(): Promise<object> {
  const sealed = await seal("plan", PLAN, await keyOf("server"));
  const digest = await bodyDigest(sealed);
  const plan = decode("plan", sealed.body, roundPlan);
  const terms = termsOf(plan, digest, POLICY as unknown as PrivacyPolicy);
  const enrolmentKey = (await keyOf("enrolment")).publicKey;
  const made = await Promise.all(
    Array.from({ length: DEVICES }, async (_, index) => {
      const name = `neighbour ${index}`;
      const [key, drawn] = [await signingKeyOf(fixed(name)), { count: 0 }];
      const draw = (count: number) => {
        drawn.count += count;
        return fixed(`${name} draws`, drawn.count).slice(drawn.count - count);
      };
      const chain = await chainOf(key, `token of ${name}`);
      const acting = await Participant.open(terms, { key, chain, enrolmentKey }, NOBODY, draw);
      const vector = Uint32Array.from(fixed(`${name} vector`, LENGTH), (byte) => 16 * byte);
      return { name, acting, chain, drawn, vector };
    }),
  );
  made.sort((one, other) => (one.acting.deviceId < other.acting.deviceId ? -1 : 1));
  const room = await NeighbourRoom.of(made.map(({ acting }) => acting), terms.sizes);
  // The last device garbles what it deals first.
  await room.deal((place, { places, dealt }) => {
    if (place !== DEVICES - 1) return { places, dealt };
    return { places, dealt: dealt.map((byte, index) => (index === 40 ? byte ^ 1 : byte)) };
  });
  await room.receive();
  expect(room.refused[room.drawn.at(-1)![0]!]!.dealers).toEqual([DEVICES - 1]);
  // The first device leaves before it masks.
  const survivors = new Set([...made.keys()].filter((place) => place > 0));
  const masked = new Map<number, Uint32Array>();
  const total = new Uint32Array(LENGTH);
  for (const place of survivors) {
    const vector = await room.devices[place]!.mask(made[place]!.vector, room.partners(place));
    masked.set(place, vector);
    vector.forEach((entry, index) => (total[index]! += entry));
  }
  reduce(total, BITS);
  const answers = await room.answer(survivors);
  const said = <T>(kind: Kind<T>, message: T | undefined): string | null =>
    message === undefined ? null : hex(write(kind, message));
  return {
    server_key: hex((await keyOf("server")).publicKey),
    enrolment_key: hex(enrolmentKey),
    population: POPULATION,
    sealed_plan: plain(sealed),
    plan_digest: digest,
    policy: POLICY,
    devices: made.map(({ name, acting, chain, drawn, vector }, place) => ({
      device_id: acting.deviceId,
      place,
      identity_seed: hex(fixed(name)),
      chain: plain(chain),
      randomness: hex(fixed(`${name} draws`, drawn.count)),
      vector: [...vector],
      member: hex(room.members[place]!),
      // Of the others what they say is enough for the sum.
      gets: place >= REPLAYED ? null : {
        draw: said(INVITATION, room.invitation(place)),
        deal: said(NEIGHBOURS, room.introduce(place)),
        receive: said(INBOX, room.inboxes[place]),
        mask: said(PARTNERS, room.partners(place)),
        confirm: said(QUESTION, room.questions.get(place)),
        answer: survivors.has(place) ? said(INCLUSIONS, room.inclusions(place)) : null,
      },
      says: {
        draw: said(DRAWN, { places: room.drawn[place]! }),
        deal: said(DEALT, room.dealt[place]),
        receive: said(REFUSED, room.refused[place]),
        confirm: said(CONFIRMED, room.confirmed.get(place)),
        answer: said(ANSWER, answers.get(place)),
      },
      masked: masked.has(place) ? [...masked.get(place)!] : null,
    })),
    masked_sum: [...total],
  };
}

test("the committed round is what these devices make", async () => {
  const made = `${JSON.stringify(await makeRound(), null, 1)}\n`;
  if (process.env.MAKE_VECTORS === "1") writeFileSync(FILE, made);
  const same = readFileSync(FILE, "utf8") === made;
  expect(same, "vectors/browser/neighbours.json is stale: run with MAKE_VECTORS=1").toBe(true);
});
