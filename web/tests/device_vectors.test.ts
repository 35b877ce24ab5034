/** The protocol's committed vectors, which Python made: every case is reproduced, every failure refused by its name. */

import { createCipheriv, createHash } from "node:crypto";
import { readFileSync } from "node:fs";

import { describe, expect, test } from "vitest";

import type { Decoder } from "../src/bundle/decoders.js";
import { hex } from "../src/bundle/digests.js";
import { unhex, utf8 } from "../src/device/bytes.js";
import { agree, agreementKey, publicKeyOf, signingKeyOf } from "../src/device/crypto.js";
import { rotationRequest, verifyChain } from "../src/device/identity.js";
import { decode, encode } from "../src/device/messages/fields.js";
import { chain } from "../src/device/messages/identity.js";
import { cohort, complaints, survivors } from "../src/device/messages/secure.js";
import { cohortDigest } from "../src/device/secagg/cohort.js";
import { complaintsDigest } from "../src/device/secagg/complaints.js";
import { survivorsDigest } from "../src/device/secagg/confirmations.js";
import { envelopeKey, pairwiseMaskKey, roundSalt, selfMaskKey } from "../src/device/secagg/keys.js";
import { applyMask, reduce } from "../src/device/secagg/masks.js";
import { reconstruct, split } from "../src/device/secagg/shamir.js";
import { drawer, replay, STEPS } from "./replay.js";

// The files' shapes are those that scripts/make_vectors.py writes.
type Json = any;

function load(name: string): Json {
  return JSON.parse(readFileSync(new URL(`../../vectors/protocol/${name}.json`, import.meta.url), "utf8"));
}

function read<T>(value: unknown, decoder: Decoder<T>): T {
  return decode("vector", utf8(JSON.stringify(value)), decoder);
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

// A request is of the chain and of two keys, and of nothing else: the same bytes as Python's, also a second time.
test.each((ROTATION.requests as Json[]).filter(({ error }) => !error))("rotation: $name", async (each) => {
  const certificate = JSON.parse(atob(each.request.certificate.body)) as { number: number };
  const whole = read(each.chain, chain);
  const before = { ...whole, rotations: (whole.rotations ?? []).slice(0, certificate.number - 1) };
  const seeds = (ROTATION.key_seeds as string[]).slice(certificate.number - 1, certificate.number + 1);
  const [old, next] = await Promise.all(seeds.map((seed) => signingKeyOf(unhex(seed))));
  const made = await rotationRequest(before, old!, next!, unhex(ROTATION.server_key));
  expect(JSON.parse(new TextDecoder().decode(encode(made)))).toEqual(each.request);
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

describe("round", () => {
  test.each([0, 1, 2, 3, 4])("device %i", async (index) => {
    expect(await replay(ROUND, index)).toEqual(STEPS);
  });

  test.each(ROUND.device_failures as Json[])("$step: $name", ({ step, message, error }) =>
    refused(error, () => replay(ROUND, 0, { step, message })),
  );

  test("digests", async () => {
    expect(await cohortDigest(read(ROUND.cohort, cohort))).toBe(ROUND.cohort_digest);
    expect(await complaintsDigest(read(ROUND.complaints, complaints))).toBe(ROUND.complaints_digest);
    expect(await survivorsDigest(read(ROUND.survivors, survivors))).toBe(ROUND.survivors_digest);
  });
});
