/** What a device keeps of a round over neighbours over a reload: enough to go on, and not to say another thing. */

import { readFileSync } from "node:fs";

import { expect, test } from "vitest";

import { unhex } from "../src/device/bytes.js";
import { ConsistencyError, MessageError, SecureAggregationError } from "../src/device/errors.js";
import {
  INBOX, INCLUSIONS, INVITATION, NEIGHBOURS, PARTNERS, QUESTION, read,
} from "../src/device/secagg_plus/messages.js";
import { Participant } from "../src/device/secagg_plus/participant.js";
import { readState, type State } from "../src/device/secagg_plus/state.js";
import { givenTo } from "./replay_neighbours.js";

// The file's shape is that which scripts/make_vectors.py writes.
type Json = any;

const FILE = new URL("../../vectors/protocol/neighbours.json", import.meta.url);
const ROUND: Json = JSON.parse(readFileSync(FILE, "utf8")).malicious;
const [DEVICE] = ROUND.devices as Json[];
const GETS = Object.fromEntries(
  Object.entries(DEVICE.gets as Record<string, string>).map(([step, said]) => [step, unhex(said)]),
);
const QUESTIONED = read(QUESTION, GETS.confirm!);
const [TERMS, ...GIVEN] = await givenTo(ROUND, DEVICE);
const VECTOR = Uint32Array.from(DEVICE.vector);
const STEPS = ["advertise", "draw", "deal", "receive", "mask", "confirm", "answer"] as const;

function take(acting: Participant, step: (typeof STEPS)[number]): Promise<unknown> {
  switch (step) {
    case "advertise":
      return acting.advertise();
    case "draw":
      return acting.draw(read(INVITATION, GETS.draw!));
    case "deal":
      return acting.deal(read(NEIGHBOURS, GETS.deal!));
    case "receive":
      return acting.receive(read(INBOX, GETS.receive!));
    case "mask":
      return acting.mask(VECTOR, read(PARTNERS, GETS.mask!));
    case "confirm":
      return acting.confirm(QUESTIONED);
    case "answer":
      return acting.answer(QUESTIONED, read(INCLUSIONS, GETS.answer!));
  }
}

/** The device after all steps up to this one, with the randomness of this process. */
async function through(last: (typeof STEPS)[number]): Promise<Participant> {
  // The file's draw: its messages are for the places that were drawn so.
  const acting = await Participant.open(...(await givenTo(ROUND, DEVICE)));
  for (const step of STEPS.slice(0, STEPS.indexOf(last) + 1)) await take(acting, step);
  return acting;
}

const resumed = (state: Uint8Array): Promise<Participant> => Participant.resume(state, TERMS, ...GIVEN);

test("no second vector is masked", async () => {
  const state = (await through("mask")).save();
  const kept = readState(state, TERMS.session, DEVICE.device_id).state;
  expect([kept.cipherSecret.length, kept.maskSecret.length, kept.seed.length]).toEqual([0, 0, 0]);
  const again = (await resumed(state)).mask(new Uint32Array(5), read(PARTNERS, GETS.mask!));
  await expect(again).rejects.toThrow("step mask in round");
});

test("another question is not answered", async () => {
  const state = (await through("confirm")).save();
  const { present, left } = QUESTIONED;
  const other = { present: present.slice(1), left: [...left, present[0]!] };
  await expect((await resumed(state)).confirm(other)).rejects.toThrow("expected answer");
  const answered = (await resumed(state)).answer(other, read(INCLUSIONS, GETS.answer!));
  await expect(answered).rejects.toThrow("not the one that this device has confirmed");
  expect((await resumed(state)).question).toEqual(QUESTIONED);
});

test("nothing is kept after the last answer, nor after a step that failed", async () => {
  const done = readState((await through("answer")).save(), TERMS.session, DEVICE.device_id).state;
  expect([done.next, done.held.size]).toEqual(["done", 0]);
  const acting = await through("receive");
  const stranger = { gone: [DEVICE.place], others: [], mask_keys: new Uint8Array() };
  await expect(acting.mask(VECTOR, stranger)).rejects.toThrow(ConsistencyError);
  const { state } = acting as unknown as { state: State };
  expect([state.maskSecret.length, state.seed.length, state.held.size]).toEqual([0, 0, 0]);
  expect(acting.next).toBe("nothing, the device left the round");
  expect(() => acting.save()).toThrow("this device has left it");
  for (const step of STEPS) await expect(take(acting, step)).rejects.toThrow(SecureAggregationError);
});

test("steps come once and in order", async () => {
  for (const [index, step] of STEPS.entries()) {
    const acting = index ? await through(STEPS[index - 1]!) : await Participant.open(TERMS, ...GIVEN);
    for (const other of STEPS) {
      if (other !== step) await expect(take(acting, other)).rejects.toThrow(`expected ${step}`);
    }
  }
});

test("a state is for one round and one device", async () => {
  const state = (await through("receive")).save();
  const elsewhere = { ...TERMS, session: { ...TERMS.session, roundId: "0".repeat(32) } };
  await expect(Participant.resume(state, elsewhere, ...GIVEN)).rejects.toThrow(ConsistencyError);
  const planned = { ...TERMS, session: { ...TERMS.session, plan: "0".repeat(64) } };
  await expect(Participant.resume(state, planned, ...GIVEN)).rejects.toThrow(ConsistencyError);
  const [terms, ...given] = await givenTo(ROUND, ROUND.devices[1]);
  await expect(Participant.resume(state, terms, ...given)).rejects.toThrow(ConsistencyError);
});

test("a damaged state is refused, and its error shows nothing of it", async () => {
  const state = (await through("receive")).save();
  const words = "state of a secure round: damaged, or of another version";
  for (let end = 0; end < state.length; end += 97) {
    const cut = state.slice(0, end);
    expect(() => readState(cut, TERMS.session, DEVICE.device_id)).toThrow(new MessageError(words));
  }
});

test("randomness that is too short makes no keys", async () => {
  const [identity, revoked] = GIVEN;
  const acting = await Participant.open(TERMS, identity, revoked, () => new Uint8Array(8));
  await expect(acting.advertise()).rejects.toThrow("asked for 32 bytes, got 8");
});

test("an entry that the modulus does not hold is not masked", async () => {
  const acting = await through("receive");
  const masked = acting.mask(Uint32Array.of(0, 2 ** 24, 0, 0, 0), read(PARTNERS, GETS.mask!));
  await expect(masked).rejects.toThrow("entry 1 is not below 2^24");
});

test("a device has the chain of its own key", async () => {
  const [, identity] = await givenTo(ROUND, DEVICE);
  const [, other] = await givenTo(ROUND, ROUND.devices[1]);
  const mixed = { ...identity, chain: other.chain };
  await expect(Participant.open(TERMS, mixed, GIVEN[1])).rejects.toThrow("is for another identity key");
});
