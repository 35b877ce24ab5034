/** The journal and the books of a device, in an IndexedDB of memory: what holds after an end between any two steps. */

import { IDBDatabase, IDBFactory } from "fake-indexeddb";
import { beforeEach, describe, expect, test, vi } from "vitest";

import { sha256 } from "../src/bundle/digests.js";
import { openBundle } from "../src/bundle/reader.js";
import { configOf } from "../src/device/config.js";
import type { Enrolment } from "../src/device/enrolment.js";
import { ClientError } from "../src/device/errors.js";
import { OwnerLimits } from "../src/device/limits.js";
import type { RoundPlan } from "../src/device/messages/rounds.js";
import { epsilonOf, noiseOf } from "../src/device/privacy.js";
import { DeviceDatabase } from "../src/device/storage/database.js";
import { Journal, statePlace } from "../src/device/storage/journal.js";
import { NO_PLANS, takePlan, whyExpired, whyOld } from "../src/device/storage/plan_book.js";
import { type SealedBytes, Vault } from "../src/device/storage/vault.js";
import { keyBytes } from "../src/source.js";
import { fixture } from "./fixture.js";

const hexOf = (number: number, digits = 32): string => number.toString(16).padStart(digits, "0");

function planOf(serial: number, changes: Partial<RoundPlan> = {}): RoundPlan {
  const fixed = {
    protocol: "complete", task_id: hexOf(7), number: 1, bundle: hexOf(1, 64), buffered: false, staleness_exponent: null,
  };
  return { ...fixed, round_id: hexOf(serial), serial, not_after: 1000, ...changes } as RoundPlan;
}

describe("plans that were taken", () => {
  test("a synchronous task's serials grow", () => {
    const taken = takePlan(takePlan(NO_PLANS, planOf(3)), planOf(5));
    expect(whyOld(taken, planOf(6))).toBe("");
    for (const serial of [3, 4, 5]) expect(whyOld(taken, planOf(serial))).toContain(`its serial is ${serial}`);
    expect(whyOld(taken, planOf(1, { task_id: hexOf(8) }))).toBe("");
  });

  test("an asynchronous task's may overlap, but none comes twice", () => {
    const late = { staleness_exponent: 0.5 };
    let taken = NO_PLANS;
    for (const serial of [10, 12, 14, 16, 18, 20, 22]) taken = takePlan(taken, planOf(serial, late));
    expect(whyOld(taken, planOf(9, late))).toBe("");
    expect(whyOld(taken, planOf(12, late))).not.toBe("");
    // With eight serials the book has forgotten those below.
    taken = takePlan(taken, planOf(24, late));
    expect(whyOld(taken, planOf(9, late))).not.toBe("");
    expect(whyOld(taken, planOf(11, late))).toBe("");
  });

  test("of forgotten tasks only plans that last longer are taken", () => {
    let taken = NO_PLANS;
    for (let task = 0; task < 300; task++) {
      taken = takePlan(taken, planOf(1, { task_id: hexOf(task), not_after: task }));
    }
    expect(Object.keys(taken.tasks)).toHaveLength(256);
    expect(taken.forgotten).toBe(43);
    expect(whyOld(taken, planOf(9, { task_id: hexOf(2), not_after: 43 }))).toContain("its task is not known");
    expect(whyOld(taken, planOf(9, { task_id: hexOf(2), not_after: 44 }))).toBe("");
  });

  test("expiry is by the server's clock, or by the own one with a day to spare", () => {
    const plan = planOf(1, { not_after: 100_000 });
    expect(whyExpired(plan, 0, 100_001)).toContain("at the server it is 100001");
    expect(whyExpired(plan, 186_400, 99_999)).toBe("");
    expect(whyExpired(plan, 186_401, null)).toContain("is this device's clock right?");
  });
});

describe("the journal", () => {
  let now = 1_000_000;
  let [database, journal, vault] = [null as never as DeviceDatabase, null as never as Journal, null as never as Vault];

  /** As after a reload: only what is in the database is left. */
  async function reload(): Promise<void> {
    database?.close();
    database = await DeviceDatabase.open("test");
    vault = await Vault.open(database);
    journal = new Journal(database, vault, () => now++);
  }

  beforeEach(async () => {
    globalThis.indexedDB = new IDBFactory();
    await reload();
  });

  test("a round without keys begins again, one with keys never", async () => {
    await journal.begin(planOf(1), hexOf(1, 64));
    await reload();
    const again = await journal.begin(planOf(1), hexOf(1, 64));
    await again.advance("advertising");
    await reload();
    await expect(journal.begin(planOf(1), hexOf(1, 64))).rejects.toThrow("has been in it already (step advertising)");
    const [open] = await journal.unfinished();
    await open!.close("dropped", "left", 10, 20);
    await reload();
    await expect(journal.begin(planOf(1), hexOf(1, 64))).rejects.toThrow(ClientError);
    // Nor another round with the same serial.
    await expect(journal.begin(planOf(1, { round_id: hexOf(99) }), hexOf(2, 64))).rejects.toThrow("is an old one");
    expect(await journal.unfinished()).toEqual([]);
  });

  test("masked bytes are stored once, sealed, and come back as they were", async () => {
    const masked = Uint8Array.from({ length: 999 }, (_, index) => index);
    const round = await journal.begin(planOf(1), hexOf(1, 64));
    await round.storeMasked(masked, await sha256(masked));
    await expect(round.storeMasked(masked, await sha256(masked))).rejects.toThrow("they are never replaced");
    await reload();
    const [open] = await journal.unfinished();
    expect(open!.keysSent).toBe(true);
    expect(await open!.masked()).toEqual({ data: masked, digest: await sha256(masked) });
    const [kept] = await database.all<SealedBytes>("sealed");
    expect(kept!.data.subarray(0, 999)).not.toEqual(masked);
    // Bytes of another round in this one's place do not open, so nothing is sent.
    const moved = await vault.seal("masked/other", masked);
    await database.write({ store: "sealed", key: `masked/${hexOf(1)}`, value: moved });
    expect(await open!.masked()).toBe(null);
  });

  test("the new state takes the old one's place when the round counts, and only then", async () => {
    const present = async (): Promise<number[] | null> => [...((await journal.open(statePlace("net"))) ?? [])];
    const rounds = [[1, "took_part", [1]], [2, "dropped", [1]], [3, "took_part", [3]]] as const;
    for (const [serial, result, expected] of rounds) {
      const round = await journal.begin(planOf(serial), hexOf(serial, 64));
      await round.advance("assigned", { model: "net" });
      await round.keep(Uint8Array.of(), Uint32Array.of(7), Uint8Array.of(serial));
      await round.advance("confirming", { cohort: 5 });
      await reload();
      const [open] = await journal.unfinished();
      expect(open!.counted).toBe(true);
      expect(await present()).toEqual(serial === 1 ? [] : [1]);
      await open!.close(result, "", 0, 0);
      expect(await present()).toEqual(expected);
    }
    expect(await database.keys("sealed")).toEqual(["state/net"]);
    expect((await journal.totals()).smallest).toBe(5);
  });

  test("a round that begins again has nothing of the attempt before", async () => {
    const first = await journal.begin(planOf(1), hexOf(1, 64));
    await first.keep(Uint8Array.of(1), Uint32Array.of(7), Uint8Array.of(2));
    await reload();
    expect(await database.keys("sealed")).toHaveLength(3);
    await journal.begin(planOf(1), hexOf(1, 64));
    expect(await database.keys("sealed")).toEqual([]);
  });

  test("the vector comes back as it was, and is gone once it is masked", async () => {
    const vector = Uint32Array.of(0, 1, 2 ** 32 - 1);
    const round = await journal.begin(planOf(1), hexOf(1, 64));
    await round.keep(Uint8Array.of(1), vector, null);
    await round.advance("advertising", {}, Uint8Array.of(3));
    await reload();
    const [open] = await journal.unfinished();
    expect([await open!.vector(3), await open!.vector(2)]).toEqual([vector, null]);
    expect(await open!.kept("secrets")).toEqual(Uint8Array.of(3));
    await open!.storeMasked(Uint8Array.of(4), await sha256(Uint8Array.of(4)), Uint8Array.of(5));
    expect(await open!.vector(3)).toBe(null);
    expect(await open!.kept("secrets")).toEqual(Uint8Array.of(5));
  });

  test("the limit on epsilon counts a round once that goes on after its update was masked", async () => {
    const given = fixture("private");
    const { manifest } = await openBundle(given.bundle, keyBytes([given.numbers.publicKey]), true);
    const { rho } = noiseOf(manifest, "", 60);
    const limits = new OwnerLimits(configOf({ maxEpsilon: epsilonOf(1.5 * rho) }), {} as Enrolment, journal);
    const round = await journal.begin(planOf(1), hexOf(1, 64));
    await limits.checkExamples(planOf(1, { program: "" }), manifest, 60);
    await round.advance("assigned", { noise: "added", rho });
    await round.storeMasked(Uint8Array.of(4), hexOf(4, 64));
    await limits.checkExamples(planOf(1, { program: "" }), manifest, 60);
    await expect(limits.checkExamples(planOf(2, { program: "" }), manifest, 60)).rejects.toThrow("with all rounds");
  });

  test("old entries become sums", async () => {
    for (let serial = 1; serial <= 300; serial++) {
      const round = await journal.begin(planOf(serial), hexOf(serial, 64));
      await round.advance("assigned", { noise: "added", rho: 0.5 });
      await round.close(serial % 10 ? "refused" : "dropped", "", 1, 2);
    }
    const entries = await journal.entries();
    // 270 were refused, of which 256 stay; the others are all there.
    expect(entries).toHaveLength(286);
    const sums = { rounds: 300, refused: 270, dropped: 30, sent: 300, received: 600, rho: 0 };
    expect(await journal.totals()).toMatchObject(sums);
    expect(await journal.begunToday("")).toBe(30);
  });

  test("a seed is the same for the same plan, and of this device alone", async () => {
    const seed = await vault.roundSeed(hexOf(1, 64));
    await reload();
    expect(await vault.roundSeed(hexOf(1, 64))).toBe(seed);
    expect(await vault.roundSeed(hexOf(2, 64))).not.toBe(seed);
    globalThis.indexedDB = new IDBFactory();
    await reload();
    expect(await vault.roundSeed(hexOf(1, 64))).not.toBe(seed);
  });

  test("what a message depends on is on the disk, and not with the system only, before the journal says so", async () => {
    const asked: [mode: string | undefined, durability: string | undefined][] = [];
    let open = 0;
    const { transaction } = IDBDatabase.prototype;
    vi.spyOn(IDBDatabase.prototype, "transaction").mockImplementation(function (this: IDBDatabase, ...given) {
      const running = transaction.apply(this, given);
      asked.push([given[1], given[2]?.durability]);
      open++;
      running.addEventListener("complete", () => open--);
      return running;
    });
    const round = await journal.begin(planOf(1), hexOf(1, 64));
    for (const write of [
      () => round.keep(Uint8Array.of(1), Uint32Array.of(7), Uint8Array.of(2)),
      () => round.advance("advertising", {}, Uint8Array.of(3)),
      () => round.storeMasked(Uint8Array.of(4), hexOf(4, 64), Uint8Array.of(5)),
      () => round.close("took_part", "", 0, 0),
    ]) {
      asked.length = 0;
      await write();
      expect(open).toBe(0);
      const writing = asked.filter(([mode]) => mode === "readwrite");
      // One transaction for the entry and all that is beside it.
      expect(writing).toEqual([["readwrite", "strict"]]);
    }
    vi.restoreAllMocks();
  });

  test("nothing is left after an erase", async () => {
    await (await journal.begin(planOf(1), hexOf(1, 64))).advance("advertising");
    const before = vault.identity.publicKey;
    await database.erase();
    await reload();
    expect(await journal.entries()).toEqual([]);
    expect(vault.identity.publicKey).not.toEqual(before);
    expect(await database.keys("books")).toEqual([]);
  });
});
