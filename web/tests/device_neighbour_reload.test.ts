/**
 * A device whose page is loaded again in the middle of a round over neighbours: it goes on, and says nothing twice.
 *
 * `ALL_POINTS=1 npx vitest run tests/device_neighbour_reload.test.ts` takes every write and request of a round, where
 * otherwise each fifth one is taken.
 */

import { afterEach, beforeEach, expect, test, vi } from "vitest";

import { ANSWER, type Invitation, type Question, read } from "../src/device/secagg_plus/messages.js";
import type { SealedBytes } from "../src/device/storage/vault.js";
import { Tab } from "./device_tab.js";
import { NeighbourServer } from "./neighbour_server.js";

const STRIDE = process.env.ALL_POINTS === "1" ? 1 : 5;
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
  for (let most = tab.life.done - 1; most > 0; most -= STRIDE) {
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
  // At least between any two of the seven writes of a round, and with what each wrote.
  expect(resumed).toBeGreaterThan(14 / STRIDE);
  if (STRIDE === 1) expect([...repeated].sort()).toEqual(PATHS);
  else expect(repeated.size).toBeGreaterThan(1);
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

test("another cohort after a reload does not make the device draw anew", async () => {
  const update = await tab.update();
  // The server has seen what was drawn, and says nothing.
  tab.closeAfter = "POST neighbours";
  expect(await tab.work()).toBe(null);
  tab.closeAfter = "";
  tab.server.lies = { invitation: (honest: Invitation) => ({ ...honest, size: 6, root: new Uint8Array(32) }) };
  await tab.load();
  await finishes(update);
  expect(tab.server.sent.get("drawn")).toBe(2);
});

test("another question after a reload is not answered", async () => {
  const update = await tab.update();
  await reloadAt("confirmed");
  const { server } = tab;
  const asked = server.room.questions.get(server.own)!;
  server.lies = { question: ({ present, left }: Question) => ({ present: left, left: present }) };
  await finishes(update);
  const said = read(ANSWER, server.said.get("answer")![0]!);
  expect([said.seeds.length, said.mask_keys.length]).toEqual([36 * asked.present.length, 36 * asked.left.length]);
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
