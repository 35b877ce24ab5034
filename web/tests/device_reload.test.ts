/**
 * A device whose page is loaded again in the middle of a secure round: it goes on, and says nothing twice that is not
 * the same.
 *
 * `ALL_POINTS=1 npx vitest run tests/device_reload.test.ts` takes every write and request of a round, where otherwise
 * each third one is taken.
 */

import { afterEach, beforeEach, expect, test, vi } from "vitest";

import type { SealedBytes } from "../src/device/storage/vault.js";
import { Tab } from "./device_tab.js";

const STRIDE = process.env.ALL_POINTS === "1" ? 1 : 3;
const PATHS = ["advertisement", "complaints", "confirmation", "shares", "unmasking", "update"];

let tab = null as never as Tab;

beforeEach(async () => {
  tab = await Tab.open();
});

afterEach(() => {
  tab.agent.close();
  vi.restoreAllMocks();
});

/** The device takes part to the end, has said each thing once or the same again, and has erased its secrets. */
async function finishes(update: Uint32Array): Promise<void> {
  expect((await tab.work())?.kind).toBe("took_part");
  await finished(update);
}

async function finished(update: Uint32Array): Promise<void> {
  const { server } = tab;
  expect(server.phase).toBe("committed");
  expect([...server.said.keys()].sort()).toEqual(PATHS);
  for (const bodies of server.said.values()) expect(bodies).toHaveLength(1);
  expect(await server.update()).toEqual(update);
  expect(await tab.entry()).toMatchObject({ step: "closed", result: "took_part", cohort: 4, examples: 6 });
  expect(await tab.kept()).toEqual([]);
  expect(server.left).toBe(0);
}

/** The device leaves the round, and nothing of it is left. */
async function leaves(words: string): Promise<void> {
  const outcome = await tab.work();
  expect([outcome?.kind, outcome?.reason]).toEqual(["dropped", expect.stringContaining(words)]);
  for (const bodies of tab.server.said.values()) expect(bodies).toHaveLength(1);
  expect(await tab.kept()).toEqual([]);
}

/** Let the page be closed when the device reports this, and load it again. */
async function reloadAt(name: NonNullable<Tab["closeAt"]>, settings: object = {}): Promise<void> {
  tab.closeAt = name;
  expect(await tab.work()).toBe(null);
  tab.closeAt = null;
  await tab.load(undefined, settings);
}

test("a reload after any write and any request", async () => {
  const update = await tab.update();
  await tab.load();
  await finishes(update);
  const steps = tab.life.done;
  const repeated = new Set<string>();
  let resumed = 0;
  for (let most = steps - 1; most > 0; most -= STRIDE) {
    tab = await Tab.open();
    await tab.load(most);
    expect(await tab.work()).toBe(null);
    const sent = tab.server.sent.size;
    await tab.load();
    await finishes(update);
    // Once keys are sent, nothing is trained a second time.
    if (sent) expect(tab.names().filter((name) => name === "trained")).toHaveLength(1);
    resumed += Number(tab.names().includes("resumed"));
    for (const [path, times] of tab.server.sent) if (times > 1) repeated.add(path);
  }
  expect([...repeated].sort()).toEqual(PATHS);
  expect(resumed).toBeGreaterThan(steps / 2 / STRIDE);
}, 120_000);

// The fewest writes and requests with which a page gets on by a step, and more.
test.each([7, 8, 9])("reloads again and again, after %i writes and requests each", async (most) => {
  const update = await tab.update();
  await reloadAt("advertised");
  let pages = 0;
  do await tab.load(most);
  while ((await tab.work()) === null && ++pages < 20);
  expect(pages).toBeGreaterThan(2);
  await finished(update);
});

test("what is kept of a round is sealed, and each secret is there only as long as it is needed", async () => {
  const places = (kinds: string[]): string[] => kinds.map((kind) => `${kind}/${tab.server.plan.round_id}`).sort();
  await reloadAt("advertised");
  expect(await tab.kept()).toEqual(places(["plan", "secrets", "vector"]));
  await reloadAt("masked");
  expect(await tab.kept()).toEqual(places(["masked", "plan", "secrets"]));
  const bodies = await tab.database((database) => database.all<SealedBytes>("sealed"));
  for (const { data } of bodies) expect(new TextDecoder().decode(data)).not.toContain("round_id");
  await finishes(await tab.update());
});

test("a device that is stopped goes on when it works again", async () => {
  const running = tab.agent.runForever();
  while (!tab.names().includes("shared")) await new Promise((done) => setTimeout(done, 1));
  tab.agent.stop();
  await running;
  expect(tab.server.left).toBe(0);
  expect((await tab.entry()).step).not.toBe("closed");
  await tab.load();
  await finishes(await tab.update());
  expect(tab.names()).toContain("resumed");
});

test("a server that does not answer for longer than the device's patience finds it again", async () => {
  const { fetch } = tab.server;
  let away = true;
  const broken = vi.spyOn(tab.server as { fetch: typeof fetch }, "fetch");
  broken.mockImplementation(async (input, init) => {
    if (away && String(input).endsWith("/cohort")) throw new TypeError("the network failed");
    return fetch(input, init);
  });
  const outcome = await tab.agent.runOnce();
  expect([outcome.kind, outcome.reason]).toEqual(["paused", expect.stringContaining("the network failed")]);
  away = false;
  await finishes(await tab.update());
});

test.each<[string, NonNullable<Tab["closeAt"]>, string, string]>([
  ["the plan", "advertised", "plan", "the page was closed or loaded again in the round"],
  ["the secrets", "shared", "secrets", "the secrets are lost"],
  ["the vector", "shared", "vector", "the vector is lost"],
  ["the masked bytes", "masked", "masked", "the masked bytes are lost"],
])("%s lost or damaged: the device leaves", async (_, at, kind, words) => {
  for (const damage of [true, false]) {
    tab = await Tab.open();
    await reloadAt(at);
    await tab.database(async (database) => {
      const key = `${kind}/${tab.server.plan.round_id}`;
      const there = await database.get<SealedBytes>("sealed", key);
      const value = { ...there!, data: there!.data.map((byte, index) => (index === 5 ? byte ^ 1 : byte)) };
      await database.write({ store: "sealed", key, ...(damage ? { value } : {}) });
    });
    if (kind === "plan") {
      // Nothing says which round to go on with, so it ends before the next check-in.
      tab.server.assigns = false;
      expect((await tab.agent.runOnce()).kind).toBe("waiting");
      expect(await tab.entry()).toMatchObject({ result: "dropped", reason: words });
      expect(await tab.kept()).toEqual([]);
    } else {
      await leaves(words);
    }
    expect(tab.server.left).toBe(1);
  }
});

test("the secrets lost once the update counts: the device waits for the result", async () => {
  await reloadAt("confirmed");
  await tab.database((database) => {
    return database.write({ store: "sealed", key: `secrets/${tab.server.plan.round_id}` });
  });
  const waiting = await tab.agent.runOnce();
  expect([waiting.kind, waiting.reason]).toEqual(["paused", "the secrets are lost"]);
  tab.server.phase = "committed";
  expect((await tab.work())?.kind).toBe("took_part");
  expect(tab.server.said.has("unmasking")).toBe(false);
  expect(await tab.kept()).toEqual([]);
});

test("owner, publisher and revocations are asked again", async () => {
  await reloadAt("shared", { minCohort: 100 });
  await leaves("its owner allows 100");
  expect(tab.server.left).toBe(1);
});

test("a round that has failed or is over meanwhile ends", async () => {
  await reloadAt("shared");
  tab.server.phase = "failed";
  await leaves("failed");
});

test("in an asynchronous task the device leaves, as its update depends on when it is masked", async () => {
  tab = await Tab.open({ staleness_exponent: 0.5 });
  await reloadAt("shared");
  expect(await tab.kept()).toEqual([]);
  tab.server.assigns = false;
  expect((await tab.agent.runOnce()).kind).toBe("waiting");
  expect(await tab.entry()).toMatchObject({ result: "dropped", masked: null });
  expect([tab.server.left, tab.server.said.has("update")]).toEqual([1, false]);
});
