/**
 * A server that lies to a device in a round over neighbours gets no vector and no share out of it: the lies of
 * tests/attacks/by_server/test_lies_over_neighbours.py, told to a whole agent.
 */

import { afterEach, expect, test, vi } from "vitest";

import type { Bytes } from "../src/device/bytes.js";
import type {
  Inbox, Inclusions, Invitation, Neighbours, Partners, Question,
} from "../src/device/secagg_plus/messages.js";
import { read, REFUSED } from "../src/device/secagg_plus/messages.js";
import { Tab } from "./device_tab.js";
import { NeighbourServer } from "./neighbour_server.js";

const ORDER = ["member", "drawn", "dealt", "refused", "update", "inclusions", "answer"];
const signatures = (said: Inclusions, count: number): Bytes => said.signatures.slice(0, 64 * count);

afterEach(() => vi.restoreAllMocks());

type Lie = (honest: never, server: NeighbourServer) => unknown;

async function told(path: string, lie: Lie): Promise<{ tab: Tab<NeighbourServer>; said: string[] }> {
  const server = await NeighbourServer.of();
  server.lies = { [path]: (honest) => lie(honest, server) };
  const tab = await Tab.at(server);
  const outcome = await tab.work();
  tab.agent.close();
  expect(outcome?.kind).toBe("dropped");
  for (const bodies of server.said.values()) expect(bodies).toHaveLength(1);
  return { tab, said: [...server.said.keys()] };
}

/** What the device has said when it has left: everything up to, and not, this. */
const before = (what: string): string[] => ORDER.slice(0, ORDER.indexOf(what));

test.each<[string, string, string, Lie]>([
  ["another root than that of the members", "invitation", "dealt",
    (honest: Invitation) => ({ ...honest, root: new Uint8Array(32) })],
  ["a cohort as small as the threshold", "invitation", "drawn",
    (honest: Invitation) => ({ ...honest, size: 4, place: 0 })],
  ["a member of the server's making", "neighbours", "dealt", ({ members, proof }: Neighbours) => ({
    members: [members[0]!.map((byte, at) => (at === members[0]!.length - 80 ? byte ^ 1 : byte)), ...members.slice(1)],
    proof,
  })],
  ["one device at the places of two", "neighbours", "dealt",
    ({ members, proof }: Neighbours) => ({ members: [members[1], ...members.slice(1)], proof })],
  ["everybody has left", "partners", "update", (_: Partners, { room, own }: NeighbourServer) => ({
    gone: [...room.drawn[own]!].sort((one, other) => one - other), others: [], mask_keys: new Uint8Array(),
  })],
  ["somebody has left whom the device never drew", "partners", "update",
    (honest: Partners, { own }: NeighbourServer) => ({ ...honest, gone: [own] })],
  ["both shares of one device", "question", "inclusions",
    ({ present, left }: Question) => ({ present, left: [...left, present[0]!] })],
  ["a share that the device does not hold", "question", "inclusions",
    ({ present, left }: Question, { own }: NeighbourServer) => ({ present: [...present, own], left })],
  ["too few who take it as present", "inclusions", "answer", (honest: Inclusions) => ({
    neighbours: honest.neighbours.slice(0, 3), signatures: signatures(honest, 3),
  })],
  ["signatures that the server made up", "inclusions", "answer", (honest: Inclusions) => ({
    ...honest, signatures: honest.signatures.map((byte, at) => (at < 128 ? byte ^ 1 : byte)),
  })],
  ["one signature, for as many as are needed", "inclusions", "answer", ({ neighbours, ...rest }: Inclusions) => ({
    neighbours: neighbours.map(() => neighbours[0]!),
    signatures: Uint8Array.from({ length: 64 * neighbours.length }, (_, at) => rest.signatures[at % 64]!),
  })],
] as [string, string, string, Lie][])("%s", async (_, path, what, lie) => {
  const { tab, said } = await told(path, lie);
  expect(said).toEqual(before(what));
  // The peers go on without it, and nothing of the round is left on its disk.
  expect(tab.server.left).toBe(1);
});

test("envelopes under other names are named as refused, and not shown", async () => {
  const server = await NeighbourServer.of();
  server.lies = {
    inbox: (honest: Inbox) => {
      const [one, two, ...rest] = honest.dealers as [number, number, ...number[]];
      return { ...honest, dealers: [two, one, ...rest] };
    },
  } as never;
  const tab = await Tab.at(server);
  await tab.work();
  tab.agent.close();
  const [first, second] = server.room.dealersOf(server.own).slice(0, 2);
  expect(read(REFUSED, server.said.get("refused")![0]!).dealers).toEqual([first, second]);
});

test.each<[string, object, string]>([
  ["a threshold below what the policy calls for", { threshold: 3 }, "threshold 3 of 5 neighbours"],
  ["too few partners", { partners: 4 }, "4 partners for masks"],
  ["few neighbours", { threshold: 2, neighbours: 3, partners: 3 }, "threshold 2 of 3 neighbours"],
  ["a protocol that the policy does not allow", { protocol: "complete", neighbours: 0, partners: 0 },
    "protocol complete is not among the allowed neighbours"],
])("a plan with %s", async (_, changes, words) => {
  const tab = await Tab.at(await NeighbourServer.of("malicious", changes));
  const outcome = await tab.work();
  tab.agent.close();
  expect([outcome?.kind, outcome?.reason]).toEqual(["refused", expect.stringContaining(words)]);
  expect([...tab.server.said.keys()]).toEqual([]);
});

test("the same round once more, to have another vector under the same names", async () => {
  const tab = await Tab.at(await NeighbourServer.of());
  expect((await tab.work())?.kind).toBe("took_part");
  tab.server.phase = "advertising";
  for (let times = 0; times < 3; times++) expect((await tab.agent.runOnce()).kind).toBe("waiting");
  tab.agent.close();
  for (const bodies of tab.server.said.values()) expect(bodies).toHaveLength(1);
});
