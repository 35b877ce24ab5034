/** Devices at edge servers: Python's decisions about plans, policies and steps of the root's log, and the journal's. */

import { readFileSync } from "node:fs";

import { IDBFactory } from "fake-indexeddb";
import { beforeEach, expect, test } from "vitest";

import type { Decoder } from "../src/bundle/decoders.js";
import type { Manifest, PrivacyPolicy } from "../src/bundle/manifest.js";
import { utf8 } from "../src/device/bytes.js";
import { type Enrolment, ofLog } from "../src/device/enrolment.js";
import { decode } from "../src/device/messages/fields.js";
import { enrolmentToken, type Root } from "../src/device/messages/identity.js";
import { roundPlan, type RoundPlan } from "../src/device/messages/rounds.js";
import { endorsement, weightsStatement } from "../src/device/messages/weights_log.js";
import { checkPlanOrigin } from "../src/device/plan_origin.js";
import { checkPlan } from "../src/device/policy.js";
import { checkEndorsement, LogReader } from "../src/device/provenance.js";
import { DeviceDatabase } from "../src/device/storage/database.js";
import { Journal } from "../src/device/storage/journal.js";
import { Vault } from "../src/device/storage/vault.js";
import { uploadLayout } from "../src/device/updates/uploads.js";
import { fixed, tokenText } from "./device_world.js";

// The file's shape is that which scripts/protocol_vectors/trees.py writes.
type Json = any;
const TREES: Json = JSON.parse(readFileSync(new URL("../../vectors/protocol/trees.json", import.meta.url), "utf8"));

function read<T>(value: unknown, decoder: Decoder<T>): T {
  return decode("vector", utf8(JSON.stringify(value)), decoder);
}

function bytesOf(text: string): Uint8Array<ArrayBuffer> {
  return Uint8Array.from(Buffer.from(text, "base64"));
}

const ROOT: Root = {
  server_key: bytesOf(TREES.root.server_key),
  enrolment_key: bytesOf(TREES.root.enrolment_key),
  population: TREES.root.population,
};

/** The parts of a manifest that the checks read. */
function manifestOf(tree = true): Manifest {
  // What Python leaves out has its default value.
  const defaults = { colluders: 1 / 3, min_contributors: 0, max_value: 1e30, weighting: "examples", dropouts: 0.2 };
  const more = { protocols: ["complete", "neighbours"], server: "malicious", noise_multiplier: 0 };
  const own = { min_cohort: 2, threshold: 0.6, colluders: 0, levels: 1, ...TREES.policy.aggregators };
  const privacy = { ...defaults, ...more, ...TREES.policy, aggregators: tree ? own : null } as PrivacyPolicy;
  const finish = { kind: "finish", inputs: [], outputs: TREES.updates };
  return { name: "m", strategy: "fedavg", privacy, programs: { finish }, schedule: [] } as unknown as Manifest;
}

/** The name of the error's class; "" where there is none. */
async function errorOf(work: () => unknown): Promise<string> {
  const nothing = Promise.resolve().then(work);
  return nothing.then(() => "", (error: unknown) => (error as Error).constructor.name);
}

test.each(TREES.origins as Json[])("origin: $name", async ({ plan, pinned, tree, error, origin }) => {
  let found: RoundPlan | null = null;
  const said = await errorOf(async () => {
    found = await checkPlanOrigin(read(plan, roundPlan), manifestOf(tree), pinned ? ROOT : null);
  });
  expect(said).toBe(error);
  expect((found as RoundPlan | null)?.round_id ?? null).toBe(origin);
});

test("a page is no edge server", async () => {
  const [{ plan }] = TREES.origins;
  const above = { ...read(plan, roundPlan), levels: 1, site: 20 };
  await expect(checkPlanOrigin(above, manifestOf(), ROOT)).rejects.toThrow("and this is a device");
});

test.each(TREES.policies as Json[])("policy: $name", async ({ plan: given, tree, error }) => {
  const [plan, manifest] = [read(given, roundPlan), manifestOf(tree)];
  expect(await errorOf(() => checkPlan(plan, manifest.privacy, uploadLayout(manifest, plan.program)))).toBe(error);
});

test.each(TREES.steps as Json[])("step: $name", async ({ entry: said, evidence, error }) => {
  const { number, weights, task } = TREES.start;
  const start = { number, weights, task, parent: 0, bound: 0, plain: false, again: number, round: null };
  const seen = { number, head: "0".repeat(64), nodes: [start] };
  const entry = read(said, weightsStatement);
  const log = new LogReader(ROOT.population, entry.bundle, weights, ROOT.server_key, seen, () => 1);
  const keys = { serverKey: ROOT.server_key, enrolmentKey: ROOT.enrolment_key };
  expect(await errorOf(() => checkEndorsement(entry, read(evidence, endorsement), manifestOf(), log, keys))).toBe(error);
});

test("the log of a bundle that a tree trains is the root's", async () => {
  const own = { serverKey: fixed("server"), enrolmentKey: fixed("enrolment"), population: "pages" };
  const record = { ...own, root: ROOT } as unknown as Enrolment;
  const { serverKey, enrolmentKey, population } = ofLog(record, manifestOf());
  expect([serverKey, enrolmentKey, population]).toEqual([ROOT.server_key, ROOT.enrolment_key, ROOT.population]);
  expect(ofLog(record, manifestOf(false))).toBe(record);
  // A record of a page that knew no roots.
  expect(ofLog(own as unknown as Enrolment, manifestOf()).population).toBe("pages");
});

test("a token names the root", async () => {
  const token = read(JSON.parse(await tokenText("one", { root: TREES.root })), enrolmentToken);
  expect(token.root).toEqual(ROOT);
  expect(read(JSON.parse(await tokenText("one")), enrolmentToken).root).toBeNull();
  const more = { ...TREES.root, more: 1 };
  expect(await errorOf(async () => read(JSON.parse(await tokenText("one", { root: more })), enrolmentToken))).toBe(
    "MessageError",
  );
});

let journal: Journal;

beforeEach(async () => {
  globalThis.indexedDB = new IDBFactory();
  const database = await DeviceDatabase.open("trees");
  journal = new Journal(database, await Vault.open(database));
});

/** The plan of an edge's round, and the root's plan that it carries. */
async function plans(changes: Partial<RoundPlan> = {}): Promise<[RoundPlan, RoundPlan]> {
  const plan = { ...read((TREES.origins[0] as Json).plan, roundPlan), ...changes };
  return [plan, (await checkPlanOrigin(plan, manifestOf(), ROOT)) as RoundPlan];
}

test("a device is in a round of the root once, whichever edge brings it", async () => {
  const [plan, origin] = await plans();
  const round = await journal.begin(plan, "1".repeat(64));
  await round.takeOrigin(origin);
  expect((await journal.get(plan.round_id))?.origin).toBe(origin.round_id);
  // The same round, begun again after a reload.
  const again = await journal.begin(plan, "1".repeat(64));
  await again.takeOrigin(origin);
  // A round of another edge, in which the same round of the root is.
  const [other] = await plans({ round_id: "b".repeat(32), serial: plan.serial + 1 });
  const second = await journal.begin(other, "2".repeat(64));
  await expect(second.takeOrigin(origin)).rejects.toThrow("this device has been in it: its serial is 2");
  expect((await journal.get(other.round_id))?.origin).toBeUndefined();
  // The root's next one is new.
  await second.takeOrigin({ ...origin, round_id: "c".repeat(32), serial: origin.serial + 1 });
});
