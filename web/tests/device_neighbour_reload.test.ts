/** A device whose page is loaded again in the middle of a round over neighbours: it goes on, and says nothing twice. */

import { afterEach, beforeEach, expect, test, vi } from "vitest";

import type { SealedBytes } from "../src/device/storage/vault.js";
import { Tab } from "./device_tab.js";
import { NeighbourServer } from "./neighbour_server.js";

const PATHS = ["answer", "dealt", "drawn", "inclusions", "member", "refused", "update"];

let tab = null as never as Tab<NeighbourServer>;

beforeEach(async () => {
  tab = await Tab.at(await NeighbourServer.of());
});

afterEach(() => {
  tab.agent.close();
  vi.restoreAllMocks();
});

/** The device takes part to the end, has said each thing once or the same again, and has erased its secrets. */
async function finishes(update: Uint32Array): Promise<void> {
  const { server } = tab;
  expect((await tab.work())?.kind).toBe("took_part");
  expect(server.phase).toBe("committed");
  expect([...server.said.keys()].sort()).toEqual(PATHS);
  for (const [path, bodies] of server.said) expect([path, bodies.length]).toEqual([path, 1]);
  expect(await server.update()).toEqual(update);
  expect(await tab.entry()).toMatchObject({ step: "closed", result: "took_part", cohort: 0, examples: 6 });
  expect(await tab.kept()).toEqual([]);
  expect(server.left).toBe(0);
}

/** Let the page be closed when the device reports this, and load it again. */
async function reloadAt(name: NonNullable<Tab["closeAt"]>): Promise<void> {
  tab.closeAt = name;
  expect(await tab.work()).toBe(null);
  tab.closeAt = null;
  await tab.load();
}

test("a reload after any write and any request", async () => {
  const update = await tab.update();
  await tab.load();
  await finishes(update);
  const repeated = new Set<string>();
  let resumed = 0;
  // From the last one back to the first key: before that all secure rounds are the same (device_reload.test.ts).
  for (let most = tab.life.done - 1; most > 0; most--) {
    tab = await Tab.at(await NeighbourServer.of());
    await tab.load(most);
    expect(await tab.work()).toBe(null);
    if (!tab.server.sent.size) break;
    await tab.load();
    await finishes(update);
    expect(tab.names().filter((name) => name === "trained")).toHaveLength(1);
    resumed += Number(tab.names().includes("resumed"));
    for (const [path, times] of tab.server.sent) if (times > 1) repeated.add(path);
  }
  expect([...repeated].sort()).toEqual(PATHS);
  // At least between any two of the seven writes of a round.
  expect(resumed).toBeGreaterThan(14);
}, 120_000);

test("a semi-honest server, who asks for no signatures", async () => {
  tab = await Tab.at(await NeighbourServer.of("semi-honest"));
  const update = await tab.update();
  await reloadAt("shared");
  await finishes(update);
  // An empty column.
  expect(tab.server.said.get("inclusions")![0]).toEqual(Uint8Array.of(0x91, 0xc4, 0));
});

test.each<[string, NonNullable<Tab["closeAt"]>, string, string]>([
  ["the secrets", "shared", "secrets", "the secrets are lost"],
  ["the vector", "shared", "vector", "the vector is lost"],
  ["the masked bytes", "masked", "masked", "the masked bytes are lost"],
])("%s lost: the device leaves", async (_, at, kind, words) => {
  await reloadAt(at);
  const key = `${kind}/${tab.server.plan.round_id}`;
  await tab.database((database) => database.write({ store: "sealed", key }));
  const outcome = await tab.work();
  expect([outcome?.kind, outcome?.reason]).toEqual(["dropped", expect.stringContaining(words)]);
  expect([await tab.kept(), tab.server.left]).toEqual([[], 1]);
});

test("older secrets, put back: the device leaves, and masks no other vector", async () => {
  const key = `secrets/${tab.server.plan.round_id}`;
  await reloadAt("shared");
  const older = await tab.database((database) => database.get<SealedBytes>("sealed", key));
  await reloadAt("masked");
  await tab.database((database) => database.write({ store: "sealed", key, value: older }));
  const outcome = await tab.work();
  const words = "the stored secrets are not those of step masked";
  expect([outcome?.kind, outcome?.reason]).toEqual(["dropped", expect.stringContaining(words)]);
  for (const bodies of tab.server.said.values()) expect(bodies).toHaveLength(1);
});

test("in an asynchronous task the device keeps nothing, and leaves", async () => {
  tab = await Tab.at(await NeighbourServer.of("malicious", { staleness_exponent: 0.5 }));
  await reloadAt("shared");
  expect(await tab.kept()).toEqual([]);
  tab.server.assigns = false;
  expect((await tab.agent.runOnce()).kind).toBe("waiting");
  expect(await tab.entry()).toMatchObject({ result: "dropped", masked: null });
  expect([tab.server.left, tab.server.said.has("update")]).toEqual([1, false]);
});
