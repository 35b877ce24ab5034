/** One device of vectors/protocol/neighbours.json, step by step, in Node or in a page. */

import type { PrivacyPolicy } from "../src/bundle/manifest.js";
import { hex } from "../src/bundle/digests.js";
import { type Bytes, unhex, utf8 } from "../src/device/bytes.js";
import { signingKeyOf } from "../src/device/crypto.js";
import { decode } from "../src/device/messages/fields.js";
import { chain, sealed } from "../src/device/messages/identity.js";
import { roundPlan } from "../src/device/messages/rounds.js";
import { bodyDigest, unseal } from "../src/device/sealed.js";
import {
  ANSWER, CONFIRMED, DEALT, DRAWN, INBOX, INCLUSIONS, INVITATION, type Kind, NEIGHBOURS, type Neighbours, PARTNERS,
  QUESTION, read, REFUSED, write,
} from "../src/device/secagg_plus/messages.js";
import { Participant } from "../src/device/secagg_plus/participant.js";
import { termsOf } from "../src/device/secagg_plus/terms.js";
import { drawer } from "./replay.js";

// The file's shape is that which scripts/make_vectors.py writes.
type Json = any;

export const STEPS = ["plan", "advertise", "draw", "deal", "receive", "mask", "confirm", "answer"];

const HONEST = { step: "done", messages: {} };

type Given = Parameters<typeof Participant.open>;

/** What a participant of a device of the file is opened with; a lie may be about its sizes, and who is revoked. */
export async function givenTo(round: Json, device: Json, lie: Json = HONEST): Promise<Given> {
  const given = decode("plan", utf8(JSON.stringify(round.sealed_plan)), sealed);
  const plan = await unseal("plan", given, unhex(round.server_key), roundPlan);
  const terms = termsOf(plan, await bodyDigest(given), round.policy as PrivacyPolicy);
  const [neighbours, threshold, partners] = lie.sizes ?? [];
  const told = lie.sizes === undefined ? terms : { ...terms, sizes: { neighbours, threshold, partners } };
  const identity = {
    key: await signingKeyOf(unhex(device.identity_seed)),
    chain: decode("chain", utf8(JSON.stringify(device.chain)), chain),
    enrolmentKey: unhex(round.enrolment_key),
  };
  const { devices = [], tokens = [] } = lie.revoked ?? {};
  const revoked = { devices: new Set<string>(devices), tokens: new Set<string>(tokens) };
  return [told, identity, revoked, drawer(device.randomness)];
}

export async function participantOf(round: Json, device: Json, lie: Json = HONEST): Promise<Participant> {
  return Participant.open(...(await givenTo(round, device, lie)));
}

/**
 * The steps in which the device says what the file has. A `lie` has messages in place of the good ones, up to its step,
 * which is then the last; `begun` gets the names of the steps that began. With `reloads` a new participant takes
 * each step, which knows what the one before has saved.
 */
export async function replayNeighbours(
  round: Json,
  index: number,
  lie: Json = HONEST,
  begun: string[] = [],
  reloads = false,
): Promise<string[]> {
  const device = round.devices[index];
  const { gets, says } = device;
  const right: string[] = [];
  const compare = (step: string, said: Bytes, expected: string): void => {
    if (hex(said) === expected) right.push(step);
  };
  const [terms, ...given] = await givenTo(round, device, lie);
  let acting = await Participant.open(terms, ...given);
  const reload = async (said: Bytes): Promise<void> => {
    if (!reloads) return;
    acting = await Participant.resume(acting.save(said), terms, ...given);
    if (hex(acting.said) !== hex(said)) throw new Error("the state has other words");
  };
  if (acting.deviceId === device.device_id) right.push("plan");
  const member = await acting.advertise();
  compare("advertise", member, device.member);
  await reload(member);
  const told = <T>(step: string, kind: Kind<T>): T => read(kind, unhex(lie.messages[step] ?? gets[step]));
  const introduced = (): Neighbours => {
    if (lie.introduced === undefined) return told("deal", NEIGHBOURS);
    const { index: at, member, proof } = lie.introduced;
    const good = read(NEIGHBOURS, unhex(gets.deal));
    return { members: good.members.with(at, unhex(member)), proof: unhex(proof) };
  };
  const question = (): never => read(QUESTION, unhex(lie.messages.question ?? gets.confirm)) as never;
  const steps: Readonly<Record<string, () => Promise<Bytes>>> = {
    draw: async () => write(DRAWN, await acting.draw(told("draw", INVITATION))),
    deal: async () => write(DEALT, await acting.deal(introduced())),
    receive: async () => write(REFUSED, await acting.receive(told("receive", INBOX))),
    mask: async () => {
      const masked = await acting.mask(Uint32Array.from(device.vector), told("mask", PARTNERS));
      if (JSON.stringify([...masked]) === JSON.stringify(device.masked)) right.push("mask");
      return new Uint8Array();
    },
    confirm: async () => write(CONFIRMED, await acting.confirm(told("confirm", QUESTION))),
    answer: async () => write(ANSWER, await acting.answer(question(), told("answer", INCLUSIONS))),
  };
  for (const [step, take] of Object.entries(steps)) {
    if (gets[step] === null || (step === "mask" && device.masked === null)) break;
    begun.push(step);
    const said = await take();
    if (step !== "mask") compare(step, said, says[step]);
    await reload(said);
    if (step === lie.step) break;
  }
  return right;
}
