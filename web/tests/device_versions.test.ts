/** Offered versions: what a device fetches, compares, adopts and gives up, and what a server can tell of it. */

import { afterEach, beforeEach, expect, test, vi } from "vitest";

import { isFinite, type NdArray, zeros } from "../src/arrays.js";
import { writeWeights } from "../src/bundle/weights.js";
import { openBundle } from "../src/bundle/reader.js";
import type { DeviceSettings } from "../src/device/config.js";
import { statePlace } from "../src/device/storage/journal.js";
import { Vault } from "../src/device/storage/vault.js";
import { Tab } from "./device_tab.js";
import { hexOf, MODEL, openModel, PUBLISHER } from "./device_world.js";
import { examples, expectArrays, fixture } from "./fixture.js";
import { withManifest } from "./forge.js";
import { OfferServer } from "./offer_server.js";

const STRIDE = process.env.ALL_POINTS === "1" ? 1 : 4;
const SETTINGS = { adopt: true, lookSeconds: 0.01 };

let server = null as never as OfferServer;
let tab = null as never as Tab<OfferServer>;

async function open(settings: DeviceSettings = {}): Promise<void> {
  tab?.agent.close();
  server = new OfferServer(await openModel());
  tab = await Tab.at(server);
  await tab.load(undefined, { ...SETTINGS, ...settings });
}

beforeEach(() => open());

afterEach(() => {
  tab.agent.close();
  vi.restoreAllMocks();
});

/** One check-in; what the device told its owner of versions. */
async function checkIn(): Promise<unknown[]> {
  tab.events = [];
  server.requests = [];
  await tab.agent.runOnce();
  return tab.events.filter(({ name }) => name !== "waiting").map(({ name, detail }) => ({ name, ...detail }));
}

async function input(): Promise<Record<string, NdArray>> {
  const runtime = await MODEL.load();
  runtime.close();
  return examples(runtime, MODEL.group("data"));
}

async function answers(): Promise<Record<string, NdArray>> {
  return (await tab.agent.predict("mlp", await input())) as Record<string, NdArray>;
}

/** The fixture's trained parameters, which answer as Python's do, times `scale`. */
function better(scale = 1): Map<string, NdArray> {
  const changed = Object.entries(MODEL.group("parameter")).map(([name, array]) => {
    return [name, { ...array, data: (array.data as Float32Array).map((value) => scale * value) }] as const;
  });
  return new Map(changed);
}

/** The published parameters, but for the last layer, which prefers wrong answers. */
function worse(): Map<string, NdArray> {
  const bias: NdArray = { dtype: "float32", dims: [4], data: Float32Array.of(2, -2, 2, -2) };
  return new Map([...server.bundle.parameters(), ["2.bias", bias]]);
}

test("the first version, a better one, a worse one, and the way back", async () => {
  await server.offer(1);
  expect(await checkIn()).toMatchObject([
    { name: "offered", version: 1 },
    { name: "adopted", version: 1, before: 0, reason: expect.stringContaining("first") },
  ]);
  expect(await tab.agent.running()).toEqual({ mlp: 1 });
  expectArrays(await answers(), MODEL.group("before"));
  await server.offer(2, { weights: await server.trained("better", better()) });
  const [, adopted] = (await checkIn()) as { offered: number; running: number }[];
  expect(adopted).toMatchObject({ name: "adopted", version: 2, before: 1, metric: "loss" });
  expect(adopted!.offered).toBeLessThan(adopted!.running);
  expectArrays(await answers(), MODEL.group("after"));
  await server.offer(3, { weights: await server.trained("worse", worse()) });
  expect(await checkIn()).toMatchObject([
    { name: "offered", version: 3 },
    { name: "kept", version: 3, runs: 2, reason: expect.stringContaining("worse by more than 0.05") },
  ]);
  expectArrays(await answers(), MODEL.group("after"));
  // It is not looked at again before a day is over.
  expect(await checkIn()).toEqual([]);
  // Taken back: an older version for everybody. Its files are in the other slot, and need not be in the cache.
  await tab.database((database) => database.write({ store: "files", key: server.bundle.digest }));
  await server.offer(1);
  expect((await checkIn()).at(-1)).toMatchObject({ name: "adopted", version: 1, before: 2 });
  expectArrays(await answers(), MODEL.group("before"));
  // Check-ins said what was fetched, whichever ran.
  expect(server.reports.map(({ versions }) => versions)).toEqual([
    {}, { mlp: 1 }, { mlp: 2 }, { mlp: 3 }, { mlp: 3 },
  ]);
});

test("an offer of a rollout takes nothing back", async () => {
  await server.offer(2);
  await checkIn();
  await server.offer(1, { weights: await server.trained("worse", worse()), rollout: hexOf("rollout", 16) });
  expect((await checkIn()).at(-1)).toMatchObject({ name: "kept", version: 1, runs: 2 });
});

test("without the setting there are no offers, and nothing is fetched", async () => {
  await open({ adopt: false });
  await server.offer(1);
  expect(await checkIn()).toEqual([]);
  expect(server.reports).toEqual([{ protocols: ["complete", "neighbours"] }]);
  await expect(tab.agent.predict("mlp", await input())).rejects.toThrow("it runs: none");
});

test.each<[string, object, string, RegExp]>([
  ["another key", {}, "somebody", /does not verify/],
  ["another population", { population: "others" }, "server", /for population others, this is pages/],
  ["a field that nobody knows", { spy: 1 }, "server", /unknown field "spy"/],
  ["no version", { version: 0 }, "server", /from 1 to/],
])("an offer with %s is ignored", async (_, changes, by, words) => {
  await server.offer(1, changes, by);
  expect(await checkIn()).toEqual([{ name: "refused", reason: expect.stringMatching(words) }]);
  expect(server.requests).toEqual(["/v1/check-ins"]);
});

test("an older offer than one that was seen, also after a reload", async () => {
  const old = await server.sealed(1);
  await server.offer(2);
  await checkIn();
  await tab.load(undefined, SETTINGS);
  server.offers = [old];
  expect(await checkIn()).toMatchObject([{ name: "refused", reason: expect.stringMatching(/serial 1001 is older/) }]);
  // Of several offers of one model only the newest is fetched.
  await server.offer(3);
  server.offers = [await server.sealed(2), ...server.offers, await server.sealed(4)];
  expect(await checkIn()).toMatchObject([{ name: "offered", version: 4 }, { name: "adopted", version: 4 }]);
});

test.each<[string, DeviceSettings, (manifest: any) => void, object, RegExp]>([
  ["more memory than its owner allows", { maxPeakBytes: 10 }, () => undefined, {}, /maxPeakBytes/],
  ["a bundle of another publisher", { publishers: ["0".repeat(64)] }, () => undefined, {}, /no trusted keys/],
  ["a bundle for others", {}, (m) => (m.populations = ["others"]), {}, /for others, not for pages/],
  ["a bundle that has expired", {}, (m) => (m.not_after = 1), {}, /it expired at 1/],
  ["a bundle that is not there", {}, () => undefined, { bundle: hexOf("none") }, /none \(404\)/],
  ["weights that are not there", {}, () => undefined, { weights: hexOf("none") }, /none \(404\)/],
  ["a download that is too large", { maxDownloadBytes: 100 }, () => undefined, {}, /more than 100 bytes/],
])("%s is not fetched again before a day", async (_, settings, change, offer, words) => {
  await open(settings);
  const file = await withManifest(MODEL.bundle, change);
  const { digest } = await openBundle(file, PUBLISHER, true);
  server.files.set(`/v1/bundles/${digest}`, file);
  await server.offer(1, { bundle: digest, ...offer });
  expect((await checkIn()).at(-1)).toMatchObject({ name: "kept", runs: 0, reason: expect.stringMatching(words) });
  expect(await checkIn()).toEqual([]);
  expect(server.requests).toEqual(["/v1/check-ins"]);
  expect(await tab.agent.running()).toEqual({});
});

test("weights that no round can have made, or of another layout", async () => {
  const data = writeWeights(better(100));
  const far = await server.trained("far", better(100));
  await server.offer(1, { weights: far });
  expect((await checkIn()).at(-1)).toMatchObject({
    name: "kept", reason: expect.stringMatching(/ away from weights that this device knows/),
  });
  const strange = await server.trained("strange", new Map([["w", zeros("float32", [3])]]));
  await server.offer(2, { weights: strange });
  expect((await checkIn()).at(-1)).toMatchObject({ name: "kept", reason: expect.stringMatching(/missing/) });
  server.files.set(`/v1/blobs/${hexOf("unknown")}`, data);
  await server.offer(3, { weights: hexOf("unknown") });
  expect((await checkIn()).at(-1)).toMatchObject({ name: "kept", reason: expect.stringMatching(/asked for/) });
});

test("a reload after any write and any request", async () => {
  const first = await server.sealed(1);
  const second = await server.sealed(2, { weights: await server.trained("better", better()) });
  const work = () => Promise.race([tab.agent.runOnce(), tab.life.over]);
  let steps = Number.POSITIVE_INFINITY;
  for (let most = 100; most > 0; most = Math.min(most, steps) - STRIDE) {
    tab.agent.close();
    tab = await Tab.at(server);
    await tab.load(undefined, SETTINGS);
    server.offers = [first];
    await tab.agent.runOnce();
    server.offers = [second];
    await tab.load(most, SETTINGS);
    await work();
    if (most === 100) steps = tab.life.done;
    await tab.load(undefined, SETTINGS);
    // The version before answers until the new one is whole.
    const runs = (await tab.agent.running()).mlp;
    expectArrays(await answers(), MODEL.group(runs === 2 ? "after" : "before"));
    await work();
    expect(await tab.agent.running()).toEqual({ mlp: 2 });
    expectArrays(await answers(), MODEL.group("after"));
  }
  expect(steps).toBeGreaterThan(20);
}, 120_000);

test("a version with which the page ends again and again is given up", async () => {
  await server.offer(1);
  await checkIn();
  await server.offer(2, { weights: await server.trained("better", better()) });
  // The write that counts the start is the last one of each page.
  for (let page = 0; page < 3; page++) {
    await tab.load(undefined, SETTINGS);
    const write = tab.life.step.bind(tab.life);
    tab.life.step = async (work) => {
      const result = await write(work);
      const books = await tab.database((database) => database.get<any>("books", "offers"));
      return books?.mlp?.starts > page ? tab.life.close() : result;
    };
    await Promise.race([tab.agent.runOnce(), tab.life.over]);
  }
  await tab.load(undefined, SETTINGS);
  expect((await checkIn()).at(-1)).toMatchObject({ name: "kept", reason: expect.stringMatching(/ended 3 times/) });
  expect(await tab.agent.running()).toEqual({ mlp: 1 });
});

test("a version on trial that fails on a request is given up for the one before", async () => {
  await server.offer(1);
  await checkIn();
  await server.offer(2, { weights: await server.trained("loud", better(1.02)) });
  expect((await checkIn()).at(-1)).toMatchObject({ name: "adopted", version: 2 });
  await answers();
  // Both versions fail on this, so it says nothing of the new one.
  const huge = async (scale: number): Promise<Record<string, NdArray>> => {
    const [name, array] = Object.entries(await input())[0] as [string, NdArray];
    return { [name]: { ...array, data: (array.data as Float32Array).map((value) => scale * value) } };
  };
  await tab.agent.predict("mlp", await huge(1e38));
  expect(await tab.agent.running()).toEqual({ mlp: 2 });
  // The trained weights are larger, so their answers overflow sooner.
  const published = await MODEL.load();
  let scale = 1e38;
  const fails = async (): Promise<boolean> =>
    !Object.values(await published.predict(await huge(scale))).every(isFinite);
  while (await fails()) scale *= 0.9;
  const expected = await published.predict(await huge(scale));
  published.close();
  expect(await tab.agent.predict("mlp", await huge(scale))).toEqual(expected);
  expect(await tab.agent.running()).toEqual({ mlp: 1 });
  expect(await checkIn()).toMatchObject([{ name: "kept", version: 2, runs: 1, reason: /not finite/ }]);
  // Its owner is told once, and it is not adopted again under the same offer.
  expect(await checkIn()).toEqual([]);
});

test("a version whose files are damaged is given up for the one before", async () => {
  await server.offer(1);
  await checkIn();
  await server.offer(2, { weights: await server.trained("better", better()) });
  await checkIn();
  await tab.database(async (database) => {
    const files = await database.get<any>("files", "slot/mlp/b");
    await database.write({ store: "files", key: "slot/mlp/b", value: { ...files, weights: files.bundle } });
  });
  await tab.load(undefined, SETTINGS);
  expectArrays(await answers(), MODEL.group("before"));
  expect(await checkIn()).toMatchObject([{ name: "kept", version: 2, runs: 1, reason: /damaged/ }]);
});

test("what rounds have left for this device goes on with each version that has a place for it", async () => {
  const model = fixture("personal");
  const bundle = await openBundle(model.bundle, PUBLISHER, true);
  server.files.set(`/v1/bundles/${bundle.digest}`, model.bundle);
  const tensors = new Map<string, NdArray>([
    ["personal/head", { dtype: "float32", dims: [], data: new Float32Array([7]) }],
    ["personal/gone", zeros("float32", [2])],
  ]);
  await tab.database(async (database) => {
    const [vault, place] = [await Vault.open(database), statePlace("personal")];
    await database.write({ store: "sealed", key: place, value: await vault.seal(place, writeWeights(tensors)) });
  });
  await server.offer(1, { model: "personal", bundle: bundle.digest });
  expect((await checkIn()).at(-1)).toMatchObject({ name: "adopted" });
  const x = zeros("float32", [1, 3]);
  const [answer] = Object.values(await tab.agent.predict("personal", { x })) as NdArray[];
  expect(Array.from(answer!.data as Float32Array)).toEqual([7]);
});

test("nothing that leaves the device tells whether it took a version", async () => {
  const seen: unknown[] = [];
  for (const takes of [true, false]) {
    await open({ lookSeconds: 30 });
    await server.offer(1);
    await checkIn();
    await server.offer(2, { weights: await server.trained("new", takes ? better() : worse()) });
    tab.events = [];
    server.requests = [];
    const { wait } = await tab.agent.runOnce();
    // Silent until 30 seconds after the look began, and the wait that the server asked for.
    expect(wait).toBeGreaterThan(5);
    expect(wait).toBeLessThan(31);
    await tab.agent.runOnce();
    const requests = server.requests.map((each) => each.replace(/blobs\/.*/, "blobs"));
    seen.push([tab.names().includes("adopted"), requests, server.reports]);
  }
  const [[first, ...told], [second, ...also]] = seen as [unknown[], unknown[]];
  expect([first, second]).toEqual([true, false]);
  expect(also).toEqual(told);
});
