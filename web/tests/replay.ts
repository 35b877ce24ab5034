/** One device of vectors/protocol/round.json, step by step, in Node or in a page. */

import type { Decoder } from "../src/bundle/decoders.js";
import { hex } from "../src/bundle/digests.js";
import { type Bytes, unhex, utf8 } from "../src/device/bytes.js";
import { signingKeyOf } from "../src/device/crypto.js";
import { decode, encode } from "../src/device/messages/fields.js";
import { chain, sealed } from "../src/device/messages/identity.js";
import { roundPlan } from "../src/device/messages/rounds.js";
import { cohort, complaints, confirmations, shares, survivors } from "../src/device/messages/secure.js";
import { NOBODY } from "../src/device/revocations.js";
import { bodyDigest, unseal } from "../src/device/sealed.js";
import { Participant } from "../src/device/secagg/participant.js";

// The file's shape is that which scripts/make_vectors.py writes.
type Json = any;

export const STEPS = ["plan", "advertise", "keys", "share", "complain", "mask", "confirm", "unmask"];

const KINDS: Readonly<Record<string, Decoder<unknown>>> = {
  share: cohort,
  complain: shares,
  mask: complaints,
  confirm: survivors,
  unmask: confirmations,
};

/** Serves these bytes (hexadecimal) in order. */
export function drawer(randomness: string): (count: number) => Bytes {
  let rest = unhex(randomness);
  return (count) => {
    const drawn = rest.slice(0, count);
    rest = rest.slice(count);
    return drawn;
  };
}

/**
 * The steps in which the device sends what the file has; `bad` is in place of the good message at its step, which is
 * then the last: a refusal that comes later would be one of something else.
 */
export async function replay(round: Json, index: number, bad?: { step: string; message: unknown }): Promise<string[]> {
  const device = round.devices[index];
  const right: string[] = [];
  const compare = (step: string, sent: unknown, expected: unknown): void => {
    if (JSON.stringify(sorted(sent)) === JSON.stringify(sorted(expected))) right.push(step);
  };
  const plan = await unseal("plan", read(round.sealed_plan, sealed), unhex(round.server_key), roundPlan);
  const digest = await bodyDigest(read(round.sealed_plan, sealed));
  compare("plan", digest, round.plan_digest);
  const identity = {
    key: await signingKeyOf(unhex(device.identity_seed)),
    chain: read(device.chain, chain),
    enrolmentKey: unhex(round.enrolment_key),
  };
  const acting = await Participant.open(plan, digest, identity, NOBODY, drawer(device.randomness));
  const sent = await acting.advertise();
  compare("advertise", written(sent.advertisement), device.advertisement);
  compare("keys", hex(sent.envelope_keys), device.envelope_keys);
  const good: Readonly<Record<string, unknown>> = {
    share: { ...round.cohort, keys: device.cohort_keys },
    complain: device.inbox,
    mask: round.complaints,
    confirm: round.survivors,
    unmask: round.confirmations,
  };
  const given = (step: string): never =>
    read(step === bad?.step ? bad.message : good[step], KINDS[step] as Decoder<unknown>) as never;
  const after: Readonly<Record<string, () => Promise<void>>> = {
    share: async () => compare("share", written(await acting.share(given("share"))), device.shares),
    complain: async () => compare("complain", written(await acting.complain(given("complain"))), device.complaints),
    mask: async () => {
      compare("mask", [...(await acting.mask(Uint32Array.from(device.vector), given("mask")))], device.masked);
    },
    confirm: async () => {
      const confirmed = round.confirmations.confirmations.find((each: Json) => each.device === acting.deviceId);
      compare("confirm", written(await acting.confirm(given("confirm"))), confirmed?.confirmation);
    },
    unmask: async () => compare("unmask", written(await acting.unmask(given("unmask"))), device.answer),
  };
  for (const [step, take] of Object.entries(after)) {
    await take();
    if (step === bad?.step) break;
  }
  return right;
}

function read<T>(value: unknown, decoder: Decoder<T>): T {
  return decode("vector", utf8(JSON.stringify(value)), decoder);
}

/** The message as its JSON would be read again. */
function written(message: object): Json {
  return JSON.parse(new TextDecoder().decode(encode(message)));
}

/** With the keys of all objects in one order. */
function sorted(value: unknown): unknown {
  if (Array.isArray(value)) return value.map(sorted);
  if (typeof value !== "object" || value === null) return value;
  return Object.fromEntries(Object.entries(value).sort().map(([key, part]) => [key, sorted(part)]));
}
