/** The protocol's committed vectors, which Python made: every case is reproduced, every failure refused by its name. */

import { createCipheriv, createHash } from "node:crypto";
import { readFileSync } from "node:fs";

import { describe, expect, test } from "vitest";

import type { Decoder } from "../src/bundle/decoders.js";
import { hex } from "../src/bundle/digests.js";
import { type Bytes, unhex, utf8 } from "../src/device/bytes.js";
import { agree, agreementKey, publicKeyOf, signingKeyOf } from "../src/device/crypto.js";
import { verifyChain } from "../src/device/identity.js";
import { decode, encode } from "../src/device/messages/fields.js";
import { chain, sealed } from "../src/device/messages/identity.js";
import { roundPlan } from "../src/device/messages/rounds.js";
import { cohort, complaints, confirmations, shares, survivors } from "../src/device/messages/secure.js";
import { bodyDigest, unseal } from "../src/device/sealed.js";
import { cohortDigest } from "../src/device/secagg/cohort.js";
import { complaintsDigest } from "../src/device/secagg/complaints.js";
import { survivorsDigest } from "../src/device/secagg/confirmations.js";
import { envelopeKey, pairwiseMaskKey, roundSalt, selfMaskKey } from "../src/device/secagg/keys.js";
import { applyMask, reduce } from "../src/device/secagg/masks.js";
import { Participant } from "../src/device/secagg/participant.js";
import { reconstruct, split } from "../src/device/secagg/shamir.js";

// The files' shapes are those that scripts/make_vectors.py writes.
type Json = any;

function load(name: string): Json {
  return JSON.parse(readFileSync(new URL(`../../vectors/protocol/${name}.json`, import.meta.url), "utf8"));
}

function read<T>(value: unknown, decoder: Decoder<T>): T {
  return decode("vector", utf8(JSON.stringify(value)), decoder);
}

/** The message as its JSON would be read again: bytes as base64, fields in any order. */
function written(message: object): Json {
  return JSON.parse(new TextDecoder().decode(encode(message)));
}

function drawer(randomness: string): (count: number) => Bytes {
  let rest = unhex(randomness);
  return (count) => {
    const drawn = rest.slice(0, count);
    rest = rest.slice(count);
    return drawn;
  };
}

const [IDENTITY, ROTATION, SHAMIR, MASKS, ROUND] = ["identity", "rotation", "shamir", "masks", "round"].map(load);

async function refused(name: string, work: () => unknown): Promise<void> {
  const error: unknown = await Promise.resolve().then(work).then(
    () => undefined,
    (raised: unknown) => raised,
  );
  // Exactly this class: a ShareError is not good enough for a ConsistencyError.
  expect((error as Error | undefined)?.constructor.name).toBe(name);
}

describe("identity", () => {
  const enrolmentKey = unhex(IDENTITY.enrolment_key);

  test.each(IDENTITY.cases as Json[])("$name", async ({ chain: given, population, now, error }) => {
    const expected = { ...(population === null ? {} : { population }), ...(now === null ? {} : { now }) };
    const work = async () => verifyChain(read(given, chain), enrolmentKey, expected);
    if (error) return refused(error, work);
    const device = await work();
    expect([hex(device.deviceKey), device.deviceId]).toEqual([IDENTITY.device_key, IDENTITY.device_id]);
  });

  test.each(ROTATION.chains as Json[])("rotated: $name", async ({ chain: given, error, key }) => {
    const work = async () => verifyChain(read(given, chain), unhex(ROTATION.enrolment_key));
    if (error) return refused(error, work);
    const device = await work();
    expect([hex(device.deviceKey), device.deviceId]).toEqual([key, ROTATION.device_id]);
  });
});

describe("shamir", () => {
  test.each(SHAMIR.cases as Json[])("$name", async ({ points, error }) => {
    const given = (points as [number, string][]).map(([x, y]) => [x, unhex(y)] as const);
    const work = (): string => hex(reconstruct(given, SHAMIR.threshold));
    if (error) return refused(error, work);
    expect(work()).toBe(SHAMIR.secret);
  });

  test("split", () => {
    const dealt = split(unhex(SHAMIR.secret), SHAMIR.threshold, 5, drawer(SHAMIR.randomness));
    expect(dealt.map(hex)).toEqual(SHAMIR.shares);
  });
});

describe("masks", () => {
  const [secret, peer] = [unhex(MASKS.private), unhex(MASKS.peer_public)];

  test("keys", async () => {
    const own = await publicKeyOf(secret);
    expect(hex(own)).toBe(MASKS.public);
    const shared = await agree(await agreementKey(secret), peer);
    expect(shared).toEqual(await agree(await agreementKey(unhex(MASKS.peer_private)), own));
    expect(hex(shared)).toBe(MASKS.shared);
    const salt = roundSalt(MASKS.round_id, MASKS.plan_digest);
    expect(hex(await envelopeKey(shared, salt, own, peer))).toBe(MASKS.keys.envelope);
    for (const [one, other] of [[own, peer], [peer, own]] as const) {
      expect(hex(await pairwiseMaskKey(shared, salt, one, other))).toBe(MASKS.keys["pairwise-mask"]);
    }
    expect(hex(await selfMaskKey(unhex(MASKS.seed), salt, own))).toBe(MASKS.keys["self-mask"]);
  });

  test.each(MASKS.expansions as Json[])("$length entries of $modulus_bits bits", async (each) => {
    const vector = new Uint32Array(each.length);
    await applyMask(vector, unhex(MASKS.keys["pairwise-mask"]), 1);
    reduce(vector, each.modulus_bits);
    expect([...vector.slice(0, 5)]).toEqual(each.first);
    expect(createHash("sha256").update(new Uint8Array(vector.buffer)).digest("hex")).toBe(each.sha256);
    await applyMask(vector, unhex(MASKS.keys["pairwise-mask"]), -1);
    reduce(vector, each.modulus_bits);
    expect(vector.every((entry) => entry === 0)).toBe(true);
  });

  test("a vector of several parts", async () => {
    const vector = new Uint32Array((1 << 20) + 9);
    await applyMask(vector, unhex(MASKS.seed), 1);
    // The same key stream by OpenSSL, at once.
    const stream = createCipheriv("aes-256-ctr", unhex(MASKS.seed), new Uint8Array(16));
    expect(stream.update(new Uint8Array(vector.byteLength)).equals(new Uint8Array(vector.buffer))).toBe(true);
  });

  test.each(MASKS.failures as Json[])("$name", ({ error, peer_public }) =>
    refused(error, async () => agree(await agreementKey(secret), unhex(peer_public))),
  );
});

const KINDS: Record<string, Decoder<unknown>> = {
  share: cohort,
  complain: shares,
  mask: complaints,
  confirm: survivors,
  unmask: confirmations,
};

/** The good steps of a device, compared as they go; `message` in place of the good one at `until`. */
async function replay(device: Json, until = "done", message: unknown = null): Promise<void> {
  const plan = await unseal("plan", read(ROUND.sealed_plan, sealed), unhex(ROUND.server_key), roundPlan);
  const digest = await bodyDigest(read(ROUND.sealed_plan, sealed));
  expect(digest).toBe(ROUND.plan_digest);
  const identity = {
    key: await signingKeyOf(unhex(device.identity_seed)),
    chain: read(device.chain, chain),
    enrolmentKey: unhex(ROUND.enrolment_key),
  };
  const acting = await Participant.open(plan, digest, identity, drawer(device.randomness));
  expect(acting.deviceId).toBe(device.device_id);
  const sent = await acting.advertise();
  expect(written(sent.advertisement)).toEqual(device.advertisement);
  expect(hex(sent.envelope_keys)).toBe(device.envelope_keys);
  const good: Record<string, unknown> = {
    share: { ...ROUND.cohort, keys: device.cohort_keys },
    complain: device.inbox,
    mask: ROUND.complaints,
    confirm: ROUND.survivors,
    unmask: ROUND.confirmations,
  };
  const given = (step: string): never => read(step === until ? message : good[step], KINDS[step]!) as never;
  expect(written(await acting.share(given("share")))).toEqual(device.shares);
  expect(written(await acting.complain(given("complain")))).toEqual(device.complaints);
  expect([...(await acting.mask(Uint32Array.from(device.vector), given("mask")))]).toEqual(device.masked);
  const signed = written(await acting.confirm(given("confirm")));
  expect(ROUND.confirmations.confirmations).toContainEqual({ device: acting.deviceId, confirmation: signed });
  expect(written(await acting.unmask(given("unmask")))).toEqual(device.answer);
}

describe("round", () => {
  test.each([0, 1, 2, 3, 4])("device %i", (index) => replay(ROUND.devices[index]));

  test.each(ROUND.device_failures as Json[])("$step: $name", ({ step, message, error }) =>
    refused(error, () => replay(ROUND.devices[0], step, message)),
  );

  test("digests", async () => {
    expect(await cohortDigest(read(ROUND.cohort, cohort))).toBe(ROUND.cohort_digest);
    expect(await complaintsDigest(read(ROUND.complaints, complaints))).toBe(ROUND.complaints_digest);
    expect(await survivorsDigest(read(ROUND.survivors, survivors))).toBe(ROUND.survivors_digest);
  });
});
