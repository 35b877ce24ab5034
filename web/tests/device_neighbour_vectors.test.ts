/** The committed vectors of rounds over neighbours, which Python made: reproduced, and lies refused by their names. */

import { readFileSync } from "node:fs";

import { describe, expect, test } from "vitest";

import { hex } from "../src/bundle/digests.js";
import { unhex } from "../src/device/bytes.js";
import { PolicyError } from "../src/device/errors.js";
import { drawNeighbours } from "../src/device/secagg_plus/drawing.js";
import { INBOX, INVITATION, NEIGHBOURS, read } from "../src/device/secagg_plus/messages.js";
import { commit, split } from "../src/device/secagg_plus/shares.js";
import { checkSizes, fewestPartners, lowestThreshold } from "../src/device/secagg_plus/sizes.js";
import { checkMembers, hashMember } from "../src/device/secagg_plus/tree.js";
import { drawer } from "./replay.js";
import { participantOf, replayNeighbours, STEPS } from "./replay_neighbours.js";

// The files' shapes are those that scripts/make_vectors.py writes.
type Json = any;

function load(name: string): Json {
  return JSON.parse(readFileSync(new URL(`../../vectors/protocol/${name}.json`, import.meta.url), "utf8"));
}

const [ROUNDS, LIES, PARTS] = ["neighbours", "neighbour_lies", "neighbour_parts"].map(load);

describe.each(["malicious", "semi-honest"])("a round with a %s server", (server) => {
  test.each((ROUNDS[server].devices as Json[]).map(({ place, masked }, index) => [place, index, masked !== null]))(
    "the device at place %i",
    async (_, index, stays) => {
      // The device that leaves gets no further than its refusals.
      const steps = stays ? STEPS : STEPS.slice(0, 5);
      expect(await replayNeighbours(ROUNDS[server], index)).toEqual(steps);
      expect(await replayNeighbours(ROUNDS[server], index, undefined, [], true)).toEqual(steps);
    },
  );
});

test.each(LIES.failures as Json[])("$step: $name", async (lie) => {
  const begun: string[] = [];
  const error: unknown = await replayNeighbours(ROUNDS.malicious, 0, lie, begun).then(
    () => undefined,
    (raised: unknown) => raised,
  );
  // Exactly this class, at this step: a ShareError is not good enough for a ConsistencyError.
  expect([(error as Error | undefined)?.constructor.name, begun.at(-1)]).toEqual([lie.error, lie.step]);
});

test.each(LIES.accepted as Json[])("accepted: $name", async (odd) => {
  const begun: string[] = [];
  const right = await replayNeighbours(ROUNDS.malicious, 0, odd, begun);
  expect(begun.at(-1)).toBe(odd.step);
  // Where the cohort is the same, so is what the device says.
  if (odd.introduced === undefined) expect(right.at(-1)).toBe(odd.step);
});

test.each(LIES.refused as Json[])("refused: $name", async ({ inbox, refused }) => {
  const [device] = ROUNDS.malicious.devices as Json[];
  const acting = await participantOf(ROUNDS.malicious, device);
  await acting.advertise();
  await acting.draw(read(INVITATION, unhex(device.gets.draw)));
  await acting.deal(read(NEIGHBOURS, unhex(device.gets.deal)));
  expect((await acting.receive(read(INBOX, unhex(inbox)))).dealers).toEqual(refused);
});

describe("parts", () => {
  test.each(PARTS.shares as Json[])("shares: $name", async (each) => {
    const shares = split(unhex(each.secret), each.threshold, each.holders, drawer(each.randomness));
    expect(shares.map(hex)).toEqual(each.shares);
    const associated = unhex(each.associated);
    const commitments = await Promise.all(shares.map((share, index) => commit(7, index + 1, share, associated)));
    expect(commitments.map(hex)).toEqual(each.commitments);
  });

  test.each(PARTS.draws as Json[])("$count drawn of $size", ({ size, own, count, randomness, places }) => {
    const draw = drawer(randomness);
    expect(drawNeighbours(size, own, count, draw)).toEqual(places);
    expect(draw(1)).toHaveLength(0);
  });

  test.each(PARTS.trees as Json[])("$places of a tree of $size", async ({ size, root, places, members, proof }) => {
    const leaves = await Promise.all((members as string[]).map((member) => hashMember(unhex(member))));
    const byPlace = new Map((places as number[]).map((place, index) => [place, leaves[index]!]));
    await checkMembers(unhex(root), size, byPlace, unhex(proof));
  });

  test.each(PARTS.sizes as Json[])("$neighbours neighbours of $cohort, $server, $corrupt corrupt", (given) => {
    const { cohort, neighbours, low, partners, server, corrupt, dropped, hidden } = given;
    const assumed = { server, corrupt, dropped, hidden, security: 40 };
    expect(lowestThreshold(cohort, neighbours, assumed)).toBe(low);
    expect(fewestPartners(cohort, neighbours, assumed)).toBe(partners);
    const check = (threshold: number, sharing: number): void =>
      checkSizes({ neighbours, threshold, partners: sharing }, cohort, assumed);
    if (partners !== null && low <= neighbours) check(low, partners);
    expect(() => check(low - 1, partners ?? neighbours)).toThrow(PolicyError);
    expect(() => check(low, (partners ?? neighbours + 1) - 1)).toThrow(PolicyError);
  });
});
