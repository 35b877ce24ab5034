/** Where weights come from: a server that rewrites its log, invents rounds or goes back is found out. */

import { IDBFactory } from "fake-indexeddb";
import { beforeEach, describe, expect, test } from "vitest";

import type { Bundle } from "../src/bundle/reader.js";
import { CertificateError, PolicyError, ProvenanceError } from "../src/device/errors.js";
import type { Enrolment } from "../src/device/enrolment.js";
import { checkOrigin } from "../src/device/origins.js";
import type { DeviceSession } from "../src/device/rounds/session.js";
import { DeviceDatabase } from "../src/device/storage/database.js";
import { hexOf, keyOf, type Lies, Log, openModel, ownWeights, POPULATION } from "./device_world.js";

let [bundle, database, log] = [null as never as Bundle, null as never as DeviceDatabase, null as never as Log];

beforeEach(async () => {
  globalThis.indexedDB = new IDBFactory();
  database = await DeviceDatabase.open("test");
  bundle = await openModel();
  log = new Log(bundle);
});

/** What the device says of these weights, for a training of the task. */
async function check(weights: string, shown = log): Promise<void> {
  const keys = { serverKey: (await keyOf("server")).publicKey, enrolmentKey: (await keyOf("enrolment")).publicKey };
  const enrolment = { population: POPULATION, ...keys } as unknown as Enrolment;
  await checkOrigin(database, bundle, weights, shown as unknown as DeviceSession, enrolment, hexOf("task", 16));
}

test("the bundle's own weights need no log", async () => {
  await check(await ownWeights(bundle));
  await expect(check(hexOf("others"))).rejects.toThrow("not in the server's log");
});

test("weights that rounds of devices made are taken, newest first", async () => {
  const one = await log.step("one", await log.start());
  const two = await log.step("two", one);
  await check(two);
  // Back to older ones only where the log says so.
  await expect(check(one)).rejects.toThrow("older than entry 3");
  await expect(check(await ownWeights(bundle))).rejects.toThrow(ProvenanceError);
  await log.add({ kind: "rollback", weights: one });
  await check(one);
});

describe("a log that is another one", () => {
  beforeEach(async () => {
    await check(await log.step("one", await log.start()));
  });

  test("it has lost entries", async () => {
    log.shown = 1;
    await expect(check(hexOf("weights one"))).rejects.toThrow("the server has 1 entries, this device has seen 2");
  });

  test("it was begun anew", async () => {
    const other = new Log(bundle);
    await other.step("another", await other.start());
    await other.step("third", hexOf("weights another"));
    await expect(check(hexOf("weights third"), other)).rejects.toThrow("does not follow the entries");
  });

  test("an entry refused once is not skipped", async () => {
    await log.step("invented", hexOf("nobody's"));
    for (const _ of [1, 2]) await expect(check(hexOf("weights invented"))).rejects.toThrow("not in the server's log");
  });
});

const OTHERS = Array.from({ length: 7 }, (_, index) => `${index}`.repeat(32));

describe("steps without devices", () => {
  const refusals: [string, Lies, string | typeof CertificateError][] = [
    ["an entry that the server did not sign", { sealedBy: "somebody" }, CertificateError],
    ["of another population", { entry: { population: "others" } }, "does not follow"],
    ["without a round", { entry: { round_id: null } }, "names its task, round, plan and parent"],
    ["from nowhere", { entry: { parent: hexOf("nobody's") } }, "not in the server's log"],
    ["of single updates", { entry: { privacy: "plain" } }, "saw single updates"],
    ["another plan", { entry: { plan: hexOf("another plan") } }, "another plan than the entry names"],
    ["a plan that the server did not sign", { planBy: "somebody" }, CertificateError],
    ["a plan of another task", { plan: { task_id: hexOf("another", 16) } }, "of another round, task or bundle"],
    ["a plain plan", { plan: { privacy: "plain" } }, "not of a secure training"],
    ["other weights to begin with", { plan: { weights: hexOf("others") } }, "began with other weights"],
    ["a plan outside the policy", { plan: { threshold: 5 } }, PolicyError as typeof CertificateError],
    ["too few in the sum", { entry: { devices: 3 } }, "survivors; the entry names 3"],
    ["signed for another round", { confirmation: { round_id: hexOf("x", 16) } }, "of another round, plan or survivor"],
    ["signed by others", { signedBy: "somebody" }, CertificateError],
    ["invented devices", { enrolment: "somebody" }, CertificateError],
    ["too few signatures", { endorsers: 6 }, "6 devices signed that they were in it, 7 are needed"],
    ["other survivors", { survivors: OTHERS }, ProvenanceError as typeof CertificateError],
  ];

  test.each(refusals)("%s", async (_, lies, error) => {
    await log.step("one", await log.start(), lies);
    await expect(check(hexOf("weights one"))).rejects.toThrow(error);
  });

  test("a round that made a step already", async () => {
    const one = await log.step("one", await log.start());
    await log.add({
      kind: "step", weights: hexOf("more"), task_id: hexOf("task", 16), parent: one, round_id: hexOf("round one", 16),
      plan: hexOf("plan"), devices: 7,
    });
    await expect(check(hexOf("more"))).rejects.toThrow("has made a step already");
  });
});
