/**
 * A server wants two answers to one question: it has a tab loaded again, and then shows it something else. The peers
 * work with the server, so that all that it shows is signed as it must be.
 */

import { afterEach, beforeEach, describe, expect, test, vi } from "vitest";

import { concat } from "../src/device/bytes.js";
import { sign } from "../src/device/crypto.js";
import { ConsistencyError, MessageError, SecureAggregationError } from "../src/device/errors.js";
import { decode, encode } from "../src/device/messages/fields.js";
import { type Confirmations, confirmation, type Complaints } from "../src/device/messages/secure.js";
import { NOBODY } from "../src/device/revocations.js";
import { seal } from "../src/device/sealed.js";
import { associatedData, ENVELOPE_BYTES } from "../src/device/secagg/envelope.js";
import { cohortDigest } from "../src/device/secagg/cohort.js";
import { KeyTree } from "../src/device/secagg/key_tree.js";
import { envelopePrivateKey, roundSalt } from "../src/device/secagg/keys.js";
import { Participant } from "../src/device/secagg/participant.js";
import { survivorsDigest } from "../src/device/secagg/confirmations.js";
import { type SealedBytes, Vault } from "../src/device/storage/vault.js";
import { DIGEST, type Member, Room, roomPlan } from "./device_room.js";
import { type Lies, type RoundServer, SMALL } from "./device_server.js";
import { Tab } from "./device_tab.js";
import { chainOf, fixed, keyOf, planOf } from "./device_world.js";

let tab = null as never as Tab;

beforeEach(async () => {
  tab = await Tab.open();
  tab.server.greedy = true;
  await tab.load();
});

afterEach(() => {
  tab.agent.close();
  vi.restoreAllMocks();
});

/** A proof that the last peer signed an envelope for the first in which there are no shares. */
async function complaint(server: RoundServer): Promise<Complaints> {
  const [first, last] = [server.peers[0] as Member, server.peers[3] as Member];
  const [complainer, accused] = [first.acting.deviceId, last.acting.deviceId];
  const cohort = await server.cohort(complainer);
  const place = [server.agentId, ...server.peers.map(({ acting }) => acting.deviceId)].sort().indexOf(accused);
  const tree = await KeyTree.of(first.advertised.envelope_keys, server.plan.max_cohort);
  const associated = associatedData(server.plan.round_id, await cohortDigest(cohort), accused, complainer);
  const ciphertext = fixed("no shares", ENVELOPE_BYTES);
  const key = await envelopePrivateKey(first.drawn[2]!, roundSalt(server.plan.round_id, server.digest), place);
  const signature = await sign(last.key, concat(associated, ciphertext));
  return { complaints: [{ complainer, accused, ciphertext, signature, key, path: tree.path(place) }] };
}

/** The peers' signatures under the claim that everybody is in the sum. */
async function everybodySigned(server: RoundServer, honest: Confirmations): Promise<Confirmations> {
  const said = decode("confirmation", honest.confirmations[0]!.confirmation.body, confirmation);
  const claim = { ...said, survivors: await survivorsDigest(everybody(server)) };
  const signed = server.peers.map(async ({ acting, key }) => {
    return { device: acting.deviceId, confirmation: await seal("confirmation", claim, key) };
  });
  return { confirmations: await Promise.all(signed) };
}

function everybody(server: RoundServer): { devices: string[] } {
  return { devices: [server.agentId, ...server.peers.map(({ acting }) => acting.deviceId)].sort() };
}

/** Another message for each step, which a device that has answered nothing yet takes; and what it then sends. */
const OTHERS: readonly [name: string, shown: string, answer: string, lies: (server: RoundServer) => Lies][] = [
  ["a smaller cohort", "cohort", "shares", (server) => ({ cohort: () => server.cohort(server.agentId, 3) })],
  ["one envelope less", "shares", "complaints", () => ({ shares: ({ shares }) => ({ shares: shares.slice(1) }) })],
  ["an accused peer", "", "update", (server) => ({ complaints: () => complaint(server) })],
  ["more survivors", "survivors", "confirmation", (server) => ({ survivors: () => everybody(server) })],
];

describe.each(OTHERS)("%s", (_, shown, answer, lies) => {
  test("a device that has answered nothing yet takes it", async () => {
    tab.server.lies = lies(tab.server);
    tab.closeAfter = `PUT ${answer}`;
    expect(await tab.work()).toBe(null);
    expect(tab.server.said.get(answer)).toHaveLength(1);
  });

  test("one that was loaded again before it answered gives one answer", async () => {
    // Complaints are told by the round's status, which the device asks for until it can mask.
    tab.closeAfter = `GET ${shown || "shares"}`;
    expect(await tab.work()).toBe(null);
    expect(tab.server.said.has(answer)).toBe(false);
    await tab.load();
    tab.server.lies = lies(tab.server);
    tab.closeAfter = `PUT ${answer}`;
    expect(await tab.work()).toBe(null);
    expect(tab.server.said.get(answer)).toHaveLength(1);
  });

  test("one that has answered sends the same again", async () => {
    tab.closeAfter = `PUT ${answer}`;
    expect(await tab.work()).toBe(null);
    const { server } = tab;
    const asked = server.asked.get(shown);
    for (let page = 0; page < 3; page++) {
      await tab.load();
      server.lies = lies(server);
      expect(await tab.work()).toBe(null);
    }
    expect([server.sent.get(answer), server.asked.get(shown)]).toEqual([4, asked]);
    tab.closeAfter = "";
    server.lies = {};
    await tab.load();
    expect((await tab.work())?.kind).toBe("took_part");
    for (const bodies of server.said.values()) expect(bodies).toHaveLength(1);
    expect(await server.update()).toEqual(await tab.update());
  });
});

test("shares of both secrets of a device are not shown, whatever the server says that the peers signed", async () => {
  tab.closeAfter = "PUT confirmation";
  expect(await tab.work()).toBe(null);
  const { server } = tab;
  server.lies = {
    survivors: () => everybody(server),
    confirmations: (honest) => everybodySigned(server, honest),
  };
  tab.closeAfter = "";
  await tab.load();
  const outcome = await tab.work();
  expect([outcome?.kind, outcome?.reason]).toEqual(["dropped", expect.stringContaining("different survivors")]);
  expect(server.said.has("unmasking")).toBe(false);
  expect(await tab.kept()).toEqual([]);
});

test("once it has shown its shares it shows no others", async () => {
  tab.closeAfter = "PUT unmasking";
  expect(await tab.work()).toBe(null);
  const { server } = tab;
  const update = await server.update();
  server.phase = "unmasking";
  server.lies = {
    survivors: () => everybody(server),
    confirmations: (honest) => everybodySigned(server, honest),
  };
  await tab.load();
  expect(await tab.work()).toBe(null);
  expect(server.sent.get("unmasking")).toBe(2);
  expect(server.said.get("unmasking")).toHaveLength(1);
  expect(update).toEqual(await tab.update());
});

test("secrets from before the masking that somebody puts back mask nothing", async () => {
  const places = ["secrets", "vector"].map((kind) => `${kind}/${tab.server.plan.round_id}`);
  tab.closeAt = "shared";
  expect(await tab.work()).toBe(null);
  const before = await tab.database((database) =>
    Promise.all(places.map((key) => database.get<SealedBytes>("sealed", key))),
  );
  tab.closeAt = "masked";
  await tab.load();
  expect(await tab.work()).toBe(null);
  await tab.database((database) =>
    database.write(...places.map((key, index) => ({ store: "sealed" as const, key, value: before[index] }))),
  );
  tab.closeAt = null;
  await tab.load();
  expect((await tab.work())?.reason).toContain("not those of step masked; the stored update was sent");
  expect(tab.server.said.get("update")).toHaveLength(1);
  expect(await tab.kept()).toEqual([]);
});

test("another plan of the server in the place of the first is not carried out", async () => {
  tab.closeAt = "shared";
  expect(await tab.work()).toBe(null);
  tab.closeAt = null;
  const { plan, bundle } = tab.server;
  const other = await seal("plan", { ...(await planOf(bundle)), ...SMALL, threshold: 5 }, await keyOf("server"));
  await tab.database(async (database) => {
    const key = `plan/${plan.round_id}`;
    const value = await (await Vault.open(database)).seal(key, encode(other));
    await database.write({ store: "sealed", key, value });
  });
  await tab.load();
  tab.server.assigns = false;
  expect((await tab.agent.runOnce()).kind).toBe("waiting");
  expect(await tab.entry()).toMatchObject({ step: "closed", result: "dropped", masked: null });
  expect(tab.names()).not.toContain("resumed");
});

describe("what a device saves", () => {
  async function opened(device = "device 0", digest = DIGEST): Promise<Parameters<typeof Participant.open>> {
    const key = await keyOf(device);
    const chain = await chainOf(key, `token of ${device}`);
    return [roomPlan(), digest, { key, chain, enrolmentKey: (await keyOf("enrolment")).publicKey }, NOBODY];
  }

  test("is of one device in one round", async () => {
    const room = await Room.of(3);
    const saved = room.members[0]!.acting.save(new Uint8Array());
    const again = await Participant.resume(saved, ...(await opened()));
    expect([again.next, again.said.length, again.save(again.said)]).toEqual(["share", 0, saved]);
    const others = [await opened("device 1"), await opened("device 0", "0".repeat(64))];
    for (const other of others) await expect(Participant.resume(saved, ...other)).rejects.toThrow(ConsistencyError);
  });

  test("is read strictly", async () => {
    const saved = (await Room.of(3)).members[0]!.acting.save(new Uint8Array());
    const text = new TextDecoder().decode(saved);
    const kept = JSON.parse(text);
    for (const wrong of [
      text.slice(0, -1),
      JSON.stringify({ ...kept, more: 1 }),
      JSON.stringify({ ...kept, next: "nothing, the device left the round" }),
      JSON.stringify({ ...kept, seed: btoa("x".repeat(33)) }),
      JSON.stringify({ ...kept, envelope_keys: btoa("x".repeat(32)) }),
    ]) {
      const work = Participant.resume(new TextEncoder().encode(wrong), ...(await opened()));
      await expect(work).rejects.toThrow(MessageError);
    }
  });

  test("is nothing once it has left the round", async () => {
    const room = await Room.of(3);
    const { acting } = room.members[0]!;
    await expect(acting.share({ members: [], keys: [] })).rejects.toThrow(ConsistencyError);
    expect(() => acting.save(new Uint8Array())).toThrow(SecureAggregationError);
  });

  test("has none of the secrets that it no longer needs", async () => {
    const room = await Room.of(3);
    const { acting } = room.members[0]!;
    const secrets = (): string[] => {
      const kept = JSON.parse(new TextDecoder().decode(acting.save(new Uint8Array())));
      const named = ["cipher_secret", "mask_secret", "envelope_secret", "seed"].filter((name) => kept[name]);
      return kept.held.length ? [...named, "held"] : named;
    };
    expect(secrets()).toEqual(["cipher_secret", "mask_secret", "envelope_secret"]);
    const dealt = await room.share();
    expect(secrets()).toEqual(["mask_secret", "envelope_secret", "seed", "held"]);
    await acting.complain(room.inbox(0, dealt));
    expect(secrets()).toEqual(["mask_secret", "seed", "held"]);
    await acting.mask(new Uint32Array(2), { complaints: [] });
    expect(secrets()).toEqual(["held"]);
    const confirming = await Room.of(3);
    const signed = await confirming.confirm();
    const last = confirming.members[0]!.acting;
    await last.unmask(signed);
    const kept = JSON.parse(new TextDecoder().decode(last.save(new Uint8Array())));
    expect([kept.held, kept.seed, kept.next]).toEqual([[], "", "done"]);
  });
});
