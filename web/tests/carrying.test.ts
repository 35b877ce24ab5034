/** What a device has learned, on the next version of a model; what is kept, listed, exported and deleted. */

import "fake-indexeddb/auto";

import { IDBFactory } from "fake-indexeddb";
import { beforeEach, describe, expect, test } from "vitest";

import { readWeights } from "../src/bundle/weights.js";
import { RuntimeInputError } from "../src/errors.js";
import { deleteSlot, exportSlot, listSlots, load, type LoadOptions, type Runtime } from "../src/index.js";
import { expectArrays, type Fixture, fixture } from "./fixture.js";
import { withManifest } from "./forge.js";

beforeEach(() => {
  globalThis.indexedDB = new IDBFactory();
});

/** The same model in another version, which has another digest. */
function version(given: Fixture, sequence: number, change: (manifest: any) => void = () => undefined) {
  return withManifest(given.bundle, (manifest) => {
    manifest.sequence = sequence;
    change(manifest);
  });
}

const open = (given: Fixture, bundle: Uint8Array, options: Partial<LoadOptions> = {}): Promise<Runtime> =>
  load(bundle, { trustedKeys: [given.numbers.publicKey], slot: "mine", ...options });

describe("a new version", () => {
  const given = fixture("personal");
  let learned: Runtime;

  beforeEach(async () => {
    learned = await open(given, given.bundle);
    await learned.localRound({ ...given.numbers.round, x: given.fit.x, broadcast: given.fit.broadcast });
    await learned.fit({ ...given.fit, epochs: 1 });
    await learned.save("mine");
  });

  const answers = async (runtime: Runtime): Promise<Record<string, any>> =>
    runtime.predict({ x: given.fit.x.x! });

  test("goes on with all that was learned", async () => {
    const next = await open(given, await version(given, 2));
    expect(next.digest).not.toBe(learned.digest);
    expect(next.restored?.digest).toBe(learned.digest);
    expect([...(next.restored?.moved ?? [])].sort()).toEqual(["parameter/w", "personal/head", "state/ci"]);
    expect(next.restored?.left).toEqual([]);
    expectArrays(await answers(next), await answers(learned), 0, 0);
    // The device's state, too: the next round begins alike.
    const round = { ...given.numbers.round, x: given.fit.x, broadcast: given.fit.broadcast };
    expectArrays((await next.localRound(round)).arrays, (await learned.localRound(round)).arrays, 0, 0);
  });

  test("or with what is the device's own, as in federations", async () => {
    const next = await open(given, await version(given, 2), { carry: "personal" });
    expect([...(next.restored?.moved ?? [])].sort()).toEqual(["personal/head", "state/ci"]);
    expect(next.restored?.left).toEqual(["parameter/w"]);
    const published = await load(given.bundle, { trustedKeys: [given.numbers.publicKey] });
    expectArrays(await next.parameters(), await published.parameters(), 0, 0);
    const nothing = await open(given, await version(given, 3), { carry: "nothing" });
    expect(nothing.restored).toBeNull();
    expectArrays(await answers(nothing), await answers(published), 0, 0);
  });

  test("of another name is another model", async () => {
    expect((await open(given, await version(given, 2, (manifest) => (manifest.name = "other")))).restored).toBeNull();
  });

  test("the one before stays, to return to, and those before it go", async () => {
    const bundles = [given.bundle, await version(given, 2), await version(given, 3)];
    const before = await answers(learned);
    for (const bundle of bundles.slice(1)) {
      const next = await open(given, bundle);
      await next.fit({ ...given.fit, epochs: 1 });
      await next.save("mine");
      await new Promise((resolve) => setTimeout(resolve, 2));
    }
    expect(await listSlots()).toHaveLength(2);
    // Version 1 is no longer kept: it has what version 3 has learned.
    const back = await open(given, given.bundle);
    expect(back.restored?.digest).not.toBe(learned.digest);
    expect(await answers(back)).not.toEqual(before);
    const second = await open(given, bundles[1]!);
    expect(second.restored?.digest).toBe(second.digest);
  });
});

test("weights of one network go together or not at all", async () => {
  const given = fixture("mlp");
  const rt = await open(given, given.bundle);
  const x = given.fit.x.input!;
  const published = await rt.predict(x);
  await rt.fit({ ...given.fit, epochs: 1 });
  await rt.save("mine");
  const next = await open(given, await version(given, 2));
  expect(next.restored?.moved).toHaveLength(4);
  expectArrays({ output: await next.predict(x) }, { output: await rt.predict(x) }, 0, 0);
  // What was kept of a network that had one tensor more.
  const { writeSlot, readSlot } = await import("../src/storage/slots.js");
  const kept = (await readSlot(rt.digest, "mine"))!;
  kept.set("parameter/4.bias", { dtype: "float32", dims: [2], data: new Float32Array(2) });
  const about = { bundle: "mlp", publisher: given.numbers.publicKey };
  await writeSlot("a".repeat(64), "grown", about, kept);
  const other = await open(given, given.bundle, { slot: "grown" });
  expect([other.restored?.moved, other.restored?.left.length]).toEqual([[], 5]);
  expectArrays({ output: await other.predict(x) }, { output: published }, 0, 0);
  // And of a publisher who is not trusted.
  await writeSlot("b".repeat(64), "foreign", { ...about, publisher: "00".repeat(32) }, kept);
  expect((await open(given, given.bundle, { slot: "foreign" })).restored).toBeNull();
});

test("slots are listed, exported and deleted", async () => {
  const given = fixture("mlp");
  const rt = await open(given, given.bundle);
  await rt.fit({ ...given.fit, epochs: 1 });
  const from = Date.now();
  await rt.save("one");
  await rt.save("two/with a line");
  const listed = await listSlots();
  expect(listed.map(({ slot }) => slot).sort()).toEqual(["one", "two/with a line"]);
  for (const each of listed) {
    expect(each).toMatchObject({ bundle: "mlp", digest: rt.digest, publisher: given.numbers.publicKey });
    expect(each.savedAt).toBeGreaterThanOrEqual(from);
    expect(each.bytes).toBeGreaterThan(1000);
  }
  const exported = readWeights(await exportSlot("one"));
  const named = Object.entries(await rt.parameters()).map(([name, array]) => [`parameter/${name}`, array]);
  expectArrays(Object.fromEntries(exported), Object.fromEntries(named), 0, 0);
  await deleteSlot("one");
  expect((await listSlots()).map(({ slot }) => slot)).toEqual(["two/with a line"]);
  await expect(exportSlot("one")).rejects.toThrow(RuntimeInputError);
  await deleteSlot("two/with a line", "0".repeat(64));
  expect(await listSlots()).toHaveLength(1);
});
