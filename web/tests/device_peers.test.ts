/** A server and devices in the cohort that lie to a device in a secure round; it leaves, and tells nothing. */

import { describe, expect, test } from "vitest";

import { concat, label, utf8 } from "../src/device/bytes.js";
import { sign } from "../src/device/crypto.js";
import { CertificateError, MessageError } from "../src/device/errors.js";
import { tokenIdOf } from "../src/device/identity.js";
import type { Chain, Sealed } from "../src/device/messages/identity.js";
import type { RoundPlan } from "../src/device/messages/rounds.js";
import type { Complaint, Complaints, Confirmations } from "../src/device/messages/secure.js";
import { NOBODY } from "../src/device/revocations.js";
import { seal } from "../src/device/sealed.js";
import { Participant } from "../src/device/secagg/participant.js";
import { chainOf, fixed, hexOf, keyOf } from "./device_world.js";
import { DIGEST, type Member, memberOf, Room, roomPlan } from "./device_room.js";

/** What the first member says of the cohort in which `last` is in the place of the last member. */
async function share(last: Member, changes: Partial<RoundPlan> = {}): Promise<unknown> {
  const room = (await Room.of(4, changes)).with(last);
  return room.members[0]!.acting.share(await room.cohort(0));
}

/** A device of the `last` key and token, which were replaced, or certified otherwise. */
async function lastWith(chain: Chain, key = "device 3"): Promise<Member> {
  return memberOf("device 3", roomPlan(), { key, chain });
}

describe("a cohort", () => {
  test("without lies", async () => {
    expect(await share(await memberOf("device 3", roomPlan()))).toMatchObject({ shares: [{}, {}, {}] });
  });

  test("with a revoked device, or one of a revoked token", async () => {
    const [device, token] = [(await Room.of(2)).id(1), await tokenIdOf((await keyOf("token of device 1")).publicKey)];
    for (const [devices, tokens] of [[[device], []], [[], [token]]] as const) {
      const revoked = { devices: new Set<string>(devices), tokens: new Set<string>(tokens) };
      const room = await Room.of(4, {}, revoked);
      await expect(room.members[0]!.acting.share(await room.cohort(0))).rejects.toThrow(/revoked/);
    }
  });

  test("of another population, or with an aggregator", async () => {
    const key = await keyOf("device 3");
    const other = await lastWith(await chainOf(key, "token of device 3", "enrolment", { population: "others" }));
    await expect(share(other)).rejects.toThrow("enrolled in others, not in pages");
    const aggregator = await lastWith(await chainOf(key, "token of device 3", "enrolment", { kind: "aggregator" }));
    await expect(share(aggregator)).rejects.toThrow("is a aggregator, this participant a device");
  });

  test("in which one device counts as two", async () => {
    const again = await memberOf("device 2", roomPlan(), { token: "another token" });
    await expect(share(again)).rejects.toThrow("is in it twice");
    // Another device by its first key, which this one has replaced by its own.
    const [first, own] = [await keyOf("device 3"), await keyOf("device 2")];
    const chain = await chainOf(first, "token of device 3");
    const device = (await memberOf("device 3", roomPlan())).acting.deviceId;
    const rotation = await seal("rotation", { device, number: 1, device_key: own.publicKey }, first);
    await expect(share(await lastWith({ ...chain, rotations: [rotation] }, "device 2"))).rejects.toThrow(
      /device key .* occurs twice/,
    );
  });

  test("with this device's keys of an earlier attempt, or another root for its envelope keys", async () => {
    const room = await Room.of(4);
    const earlier = await memberOf("device 0", room.plan, { attempt: "earlier" });
    const { acting, key } = room.members[0]!;
    const [first, ...others] = (await room.cohort(0)).members;
    const own = { chain: first!.chain, advertisement: earlier.advertised.advertisement };
    const words = "not in it with the keys that it advertised";
    await expect(acting.share({ members: [own, ...others], keys: [] })).rejects.toThrow(words);
    const again = await Room.of(4);
    const said = JSON.parse(new TextDecoder().decode(first!.advertisement.body)) as object;
    const bare = { ...said, envelope_root: btoa(String.fromCharCode(...fixed("root"))) };
    const changed = { chain: first!.chain, advertisement: await seal("advertisement", bare, key) };
    const cohort = { ...(await again.cohort(0)), members: [changed, ...others] };
    await expect(again.members[0]!.acting.share(cohort)).rejects.toThrow(words);
  });

  test.each<[number, Partial<RoundPlan>, string]>([
    [5, {}, "5 devices, the plan allows 4"],
    [2, {}, "cohort: 2, the plan needs 3"],
    [3, { min_cohort: 4 }, "cohort: 3, the plan needs 4"],
    [4, { min_cohort: 3, threshold: 4, max_cohort: 8, colluders: 4 }, "with min_cohort of at least 6"],
    [6, { max_cohort: 6 }, "not more than half of 6 devices"],
    [4, { min_cohort: 4, colluders: 2 }, "not more than half of 4 devices and 2 colluders"],
  ])("of %i, in a plan with %o", async (devices, changes, words) => {
    const work = async () => {
      const room = await Room.of(devices, changes);
      await room.members[0]!.acting.share(await room.cohort(0));
    };
    await expect(work).rejects.toThrow(words);
  });

  test("for a key that the chain is not of", async () => {
    const chain = await chainOf(await keyOf("device 1"), "token of device 1");
    const identity = { key: await keyOf("device 2"), chain, enrolmentKey: (await keyOf("enrolment")).publicKey };
    const opened = Participant.open(roomPlan(), DIGEST, identity, NOBODY);
    await expect(opened).rejects.toThrow("is for another identity key");
  });
});

describe("envelopes and complaints", () => {
  const plain = (bytes: number, value: number): Uint8Array<ArrayBuffer> => new Uint8Array(bytes).fill(value);

  test.each([
    ["of another length", { maskKey: plain(33, 0), seed: plain(34, 0) }],
    ["with a share beyond the field", { maskKey: plain(33, 255), seed: plain(33, 0) }],
    ["with the other share beyond it", { maskKey: plain(33, 0), seed: plain(33, 255) }],
  ])("an envelope %s is one without shares", async (_, shares) => {
    const room = await Room.of(4);
    const bad = (from: number, peer: string): boolean => from === 3 && peer === room.id(0);
    const told = await room.complain((from, each) => (bad(from, each.peer) ? room.envelope(3, 0, shares) : each));
    expect(told[0]!.complaints.map(({ accused }) => accused)).toEqual([room.id(3)]);
    // Everybody else finds it proven.
    await room.members[1]!.acting.mask(new Uint32Array(1), told[0]!);
  });

  test("too few envelopes", async () => {
    const room = await Room.of(4);
    const { shares } = room.inbox(0, await room.share());
    await expect(room.members[0]!.acting.complain({ shares: shares.slice(0, 1) })).rejects.toThrow(
      "devices that shared keys: 2, the plan needs 3",
    );
  });

  /** The room in which `sender` signed an envelope without shares for `recipient`, and the complaint about it. */
  async function accusing(
    sender: number,
    recipient: number,
    changes: Partial<RoundPlan> = {},
  ): Promise<{ room: Room; list: Complaints }> {
    const room = await Room.of(4, changes);
    const complained = await room.complain(async (from, share) =>
      from === sender && share.peer === room.id(recipient)
        ? room.envelope(sender, recipient, { maskKey: plain(33, 255), seed: plain(33, 0) })
        : share,
    );
    return { room, list: complained[recipient]! };
  }

  const mask = (room: Room, member: number, list: Complaints): Promise<unknown> =>
    room.members[member]!.acting.mask(new Uint32Array(1), list);

  test("a list that names a device twice, is not sorted, accuses the reader or keeps its complaint back", async () => {
    const { room, list } = await accusing(3, 1);
    const [complaint] = list.complaints as [Complaint];
    await expect(mask(room, 0, { complaints: [complaint, complaint] })).rejects.toThrow("sorted and distinct");
    await expect(mask(room, 1, { complaints: [] })).rejects.toThrow("about which this device complained");
    await expect(mask(room, 3, list)).rejects.toThrow("this device is accused");
    await mask(room, 2, list);
  });

  test("too few are left", async () => {
    const { room, list } = await accusing(3, 1, { min_cohort: 4 });
    await expect(mask(room, 0, list)).rejects.toThrow("are not accused: 3, the plan needs 4");
  });

  test("an entry that the modulus does not hold", async () => {
    const room = await Room.of(4);
    await room.complain();
    await expect(room.members[0]!.acting.mask(Uint32Array.of(2 ** 16), { complaints: [] })).rejects.toThrow(
      "entry 0 is not below 2^16",
    );
  });
});

describe("who is in the sum", () => {
  test.each<[string, (room: Room) => { devices: string[] }, string]>([
    ["not sorted", (room) => ({ devices: [...room.survivors(0, 1, 2).devices].reverse() }), "sorted and distinct"],
    ["twice", (room) => ({ devices: [room.id(0), ...room.survivors(0, 1, 2).devices].sort() }), "sorted and distinct"],
    ["a stranger", (room) => ({ devices: [...room.survivors(0, 1, 2).devices, "f".repeat(32)] }), "did not share keys"],
    ["without this device", (room) => ({ devices: [...room.survivors(1, 2, 3).devices] }), "is not among them"],
    ["too few", (room) => ({ devices: [...room.survivors(0, 1).devices] }), "survivors: 2, the plan needs 3"],
  ])("survivors: %s", async (_, said, words) => {
    const room = await Room.of(4);
    await room.mask();
    await expect(room.members[0]!.acting.confirm(said(room))).rejects.toThrow(words);
  });

  test("enough for the threshold, and too few to hide each other", async () => {
    const room = await Room.of(4, { min_cohort: 4 });
    await room.mask();
    await expect(room.members[0]!.acting.confirm(room.survivors(0, 1, 2))).rejects.toThrow("3, the plan needs 4");
  });

  /** The confirmations with another one of the second member. */
  const instead = (all: Confirmations["confirmations"], confirmation: Sealed): Confirmations["confirmations"] =>
    all.map((each, index) => (index === 1 ? { ...each, confirmation } : each));

  test("a confirmation in another spelling", async () => {
    const room = await Room.of(4);
    const { confirmations } = await room.confirm();
    const { confirmation: first } = confirmations[1]!;
    const body = utf8(` ${new TextDecoder().decode(first.body)}`);
    const signature = await sign(room.members[1]!.key, concat(label("confirmation"), body));
    const told = instead(confirmations, { body, signature });
    await expect(room.members[0]!.acting.unmask({ confirmations: told })).rejects.toThrow(MessageError);
  });

  test.each<[string, object, string]>([
    ["another attempt", { cohort: hexOf("another cohort") }, "it is for another session"],
    ["other complaints", { complaints: hexOf("others") }, "participants were told different complaints"],
  ])("a confirmation of %s", async (_, lie, words) => {
    const room = await Room.of(4);
    const { confirmations } = await room.confirm();
    const said = JSON.parse(new TextDecoder().decode(confirmations[1]!.confirmation.body)) as object;
    const confirmation = await seal("confirmation", { ...said, ...lie }, room.members[1]!.key);
    const told = instead(confirmations, confirmation);
    await expect(room.members[0]!.acting.unmask({ confirmations: told })).rejects.toThrow(words);
  });

  test("one confirmation for many, or of somebody else", async () => {
    for (const [pick, error] of [[[0, 1, 1], "twice"], [[0, 1], "nothing is revealed"]] as const) {
      const room = await Room.of(4);
      const { confirmations } = await room.confirm();
      const told = pick.map((index) => confirmations[index]!);
      await expect(room.members[0]!.acting.unmask({ confirmations: told })).rejects.toThrow(error);
    }
    const room = await Room.of(4);
    const { confirmations } = await room.confirm();
    const told = confirmations.map((each) => ({ ...each, confirmation: confirmations[0]!.confirmation }));
    await expect(room.members[0]!.acting.unmask({ confirmations: told })).rejects.toThrow(CertificateError);
  });
});
