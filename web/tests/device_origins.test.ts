/** Where weights come from: a server that rewrites its log, invents rounds or goes back is found out. */

import { createHash } from "node:crypto";

import { IDBFactory } from "fake-indexeddb";
import { beforeEach, describe, expect, test } from "vitest";

import type { Bundle } from "../src/bundle/reader.js";
import type { Program } from "../src/bundle/roles.js";
import { CertificateError, PolicyError, ProvenanceError } from "../src/device/errors.js";
import type { Enrolment } from "../src/device/enrolment.js";
import { encode } from "../src/device/messages/fields.js";
import type { RoundPlan } from "../src/device/messages/rounds.js";
import { checkOrigin } from "../src/device/origins.js";
import { type History, LogReader, NO_HISTORY } from "../src/device/provenance.js";
import { stepBound } from "../src/device/steps/step_bounds.js";
import type { Tensors } from "../src/device/steps/distances.js";
import type { DeviceSession } from "../src/device/rounds/session.js";
import { DeviceDatabase } from "../src/device/storage/database.js";
import { endorsersNeeded } from "../src/device/secagg_plus/terms.js";
import { fixed, hexOf, keyOf, type Lies, Log, openModel, ownWeights, POPULATION } from "./device_world.js";

let [bundle, database, log] = [null as never as Bundle, null as never as DeviceDatabase, null as never as Log];

beforeEach(async () => {
  globalThis.indexedDB = new IDBFactory();
  database = await DeviceDatabase.open("test");
  bundle = await openModel();
  log = new Log(bundle);
});

/** What the device still has of weights that it used, by digest. */
const files = new Map<string, Tensors>();

/** What the device says of these weights (default: they are where the bundle's are), for a training of the task. */
async function check(
  digest: string,
  shown = log,
  task = hexOf("task", 16),
  tensors: Tensors = bundle.parameters(),
): Promise<void> {
  const keys = { serverKey: (await keyOf("server")).publicKey, enrolmentKey: (await keyOf("enrolment")).publicKey };
  const enrolment = { population: POPULATION, ...keys } as unknown as Enrolment;
  const find = async (wanted: string): Promise<Tensors | null> => files.get(wanted) ?? null;
  const session = shown as unknown as DeviceSession;
  await checkOrigin(database, bundle, { digest, tensors }, find, session, enrolment, task);
}

/** The bundle's weights, moved so far in all, as an L2 norm. */
function moved(distance: number): Tensors {
  const own = bundle.parameters();
  const [name, array] = [...own][0]!;
  const data = (array.data as Float32Array).slice();
  data[0] = data[0]! + distance;
  return new Map([...own, [name, { ...array, data }]]);
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

describe("weights that no steps of the log can have made", () => {
  const far = "these are not the weights that the server says they are";
  let [one, two, step] = ["", "", 0];

  beforeEach(async () => {
    files.clear();
    one = await log.step("one", await log.start());
    two = await log.step("two", one);
    // Of the entry's seven devices and no hyperparameters of the server half.
    step = stepBound(bundle.manifest, {}, 7);
    expect(step).toBeCloseTo(1, 1);
  });

  const at = (digest: string, distance: number): Promise<void> => check(digest, log, undefined, moved(distance));

  test("are farther from the bundle's than so many steps go", async () => {
    await at(one, 0.999 * step);
    await at(two, 1.999 * step);
    await expect(at(two, 2.001 * step)).rejects.toThrow(far);
  });

  test("are farther from those that the device used last than the steps since", async () => {
    await at(one, 0);
    files.set(one, moved(0));
    await expect(at(two, 1.001 * step)).rejects.toThrow(far);
    // Without them it can measure from the bundle's alone.
    files.clear();
    await at(two, 1.001 * step);
  });

  test("after a way back the steps on both sides count", async () => {
    await at(two, 1.9 * step);
    files.set(two, moved(1.9 * step));
    const other = await log.step("three", one);
    await expect(at(other, -0.2 * step)).rejects.toThrow(far);
    await at(other, -0.05 * step);
  });

  test("came of a step beyond the policy", async () => {
    await log.step("four", two, { entry: { hyperparameters: { server_lr: 1.5 } } });
    await expect(at(hexOf("weights four"), 0)).rejects.toThrow("server_lr: 1.5 is outside");
  });

  test("the bound of the steps is remembered", async () => {
    await at(two, 0);
    database.close();
    database = await DeviceDatabase.open("test");
    const three = await log.step("three", two);
    await expect(at(three, 3.001 * step)).rejects.toThrow(far);
    await at(three, 2.999 * step);
  });
});

describe("steps between two entries", () => {
  type Seen = ConstructorParameters<typeof LogReader>[4];

  async function readerOf(seen: Seen, bound = 1): Promise<LogReader> {
    const { publicKey } = await keyOf("server");
    return new LogReader(POPULATION, bundle.digest, await ownWeights(bundle), publicKey, seen, () => bound);
  }

  test("lead back to where they parted, and on from there", async () => {
    // start - one - two - three
    //            `- four
    const one = await log.step("one", await log.start());
    await log.step("three", await log.step("two", one));
    await log.step("four", one);
    const reader = await readerOf(NO_HISTORY, 0.25);
    for (const entry of log.entries) await reader.add(entry);
    const [first, third, fourth] = ["one", "three", "four"].map((name) => reader.find(hexOf(`weights ${name}`)));
    expect([reader.boundBetween(third!, fourth!), reader.roundsBetween(third!, fourth!)]).toEqual([
      0.75, { back: 2, on: 1 },
    ]);
    expect([reader.boundBetween(first!, third!), reader.roundsBetween(first!, third!)]).toEqual([
      0.5, { back: 0, on: 2 },
    ]);
    expect([first, third, fourth].map((node) => reader.roundsTo(node!))).toEqual([1, 3, 2]);
    expect([first, third, fourth].map((node) => node!.bound)).toEqual([0.25, 0.75, 0.5]);
  });

  test("are counted as the most that there can be where entries were forgotten", async () => {
    const node = (number: number, parent: number): Seen["nodes"][number] => {
      const names = { weights: hexOf(`${number}`), task: hexOf("task", 16), round: hexOf(`round ${number}`, 16) };
      return { number, parent, bound: number, plain: false, again: number, ...names };
    };
    const [earlier, later] = [node(60, 59), node(90, 89)];
    const reader = await readerOf({ number: 90, head: hexOf("head"), nodes: [earlier, later] });
    expect(reader.boundBetween(earlier, later)).toBe(150);
    expect(reader.roundsBetween(earlier, later)).toEqual({ back: 60, on: 90 });
    expect(reader.roundsTo(later)).toBe(90);
  });

  test.each([Number.POSITIVE_INFINITY, Number.NaN, -1])("with a bound of %d are no steps", async (bound) => {
    await log.step("one", await log.start());
    const reader = await readerOf(NO_HISTORY, bound);
    await reader.add(log.entries[0]!);
    await expect(reader.add(log.entries[1]!)).rejects.toThrow("its step has no bound");
    expect(reader.history.number).toBe(1);
  });
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

  test("it was begun anew after weights were refused", async () => {
    await log.step("two", hexOf("weights one"));
    await expect(check(hexOf("unknown"))).rejects.toThrow("not in the server's log");
    // The same up to the entry that was read with the refused weights.
    const other = new Log(bundle);
    await other.step("one", await other.start());
    await other.step("another", hexOf("weights one"));
    await expect(check(hexOf("weights another"), other)).rejects.toThrow("not in the server's log");
    await other.step("third", hexOf("weights another"));
    await expect(check(hexOf("weights third"), other)).rejects.toThrow("does not follow the entries");
  });

  test("it is longer than a device reads", async () => {
    log.shown = 1 << 17;
    await expect(check(hexOf("weights one"))).rejects.toThrow("more than 65536 new entries");
  });

  test("an entry refused once is not skipped", async () => {
    await log.step("invented", hexOf("nobody's"));
    for (const _ of [1, 2]) await expect(check(hexOf("weights invented"))).rejects.toThrow("not in the server's log");
  });
});

test("a long log: the start, and what a paused task came to, are remembered", async () => {
  const [start, paused] = [await log.start(), hexOf("paused", 16)];
  await log.start({ task_id: paused });
  const one = await log.step("one", start, { entry: { task_id: paused }, plan: { task_id: paused } });
  // Single updates, so that no device has to sign.
  for (let [index, parent] = [0, start]; index < 1100; index++) {
    const weights = hexOf(`plain ${index}`);
    const round = { round_id: hexOf(`plain ${index}`, 16), plan: hexOf("plan"), privacy: "plain", devices: 1 };
    await log.add({ kind: "step", weights, parent, task_id: hexOf("task", 16), ...round });
    parent = weights;
  }
  await expect(check(hexOf("plain 1099"))).rejects.toThrow("saw single updates");
  const { history } = (await database.get<{ history: History }>("books", `origins/${bundle.digest}`))!;
  expect([history.number, history.nodes.length]).toEqual([1103, 1024]);
  expect(history.nodes.slice(0, 3).map(({ number }) => number)).toEqual([2, 3, 82]);
  await log.add({ kind: "rollback", weights: start });
  const two = await log.step("two", one, { entry: { task_id: paused }, plan: { task_id: paused } });
  await check(start, log, paused);
  await check(two, log, paused);
});

type Output = Program["outputs"][number];

test("the policy is about the largest clip that the manifest states, and no smaller default of it", async () => {
  const { finish } = bundle.manifest.programs as { finish: Program };
  const clipped = (port: Output): Output =>
    port.role === "update" && port.kind === "delta" ? { ...port, clip: 2 } : port;
  const input = { role: "hyperparameter", name: "update_clip", dtype: "float32", shape: [], default: 0.5 } as const;
  const changed = { ...finish, outputs: finish.outputs.map(clipped), inputs: [...finish.inputs, input] };
  const manifest = {
    ...bundle.manifest,
    privacy: { ...bundle.manifest.privacy, max_clip: 1 },
    programs: { ...bundle.manifest.programs, finish: changed },
  };
  const one = await log.step("one", await log.start());
  bundle = Object.create(bundle, { manifest: { value: manifest } }) as Bundle;
  await expect(check(one)).rejects.toThrow("is clipped to 2, the policy allows a norm of 1");
});

const OTHERS = Array.from({ length: 7 }, (_, index) => `${index}`.repeat(32));
const SIGNED = createHash("sha256").update(encode({ devices: OTHERS })).digest("hex");
const LATE = { staleness_exponent: 0.5, weights: hexOf("nobody's") };

test.each([
  ["other weights than the bundle's", { weights: hexOf("others") }],
  ["no task", { task_id: null }],
])("a training that starts with %s", async (_, changes) => {
  await log.start(changes);
  await expect(check(hexOf("others"))).rejects.toThrow("a training starts with the bundle's own weights");
});

test("of many new steps the last is always checked", async () => {
  let newest = await log.start();
  for (let index = 0; index < 39; index++) newest = await log.step(`${index}`, newest);
  newest = await log.step("last", newest, { endorsers: 6 });
  await expect(check(newest)).rejects.toThrow("6 devices signed");
});

describe("steps without devices", () => {
  const refusals: [string, Lies, string | typeof CertificateError][] = [
    ["an entry that the server did not sign", { sealedBy: "somebody" }, CertificateError],
    ["of another population", { entry: { population: "others" } }, "does not follow"],
    ["of another bundle", { entry: { bundle: hexOf("another") } }, "does not follow"],
    ["without a round", { entry: { round_id: null } }, "names its task, round, plan and parent"],
    ["from nowhere", { entry: { parent: hexOf("nobody's") } }, "not in the server's log"],
    ["from what another task has", { entry: { task_id: hexOf("another", 16) } }, "not in the server's log"],
    ["of single updates", { entry: { privacy: "plain" } }, "saw single updates"],
    ["another plan", { entry: { plan: hexOf("another plan") } }, "another plan than the entry names"],
    ["a plan that the server did not sign", { planBy: "somebody" }, CertificateError],
    ["a plan of another task", { plan: { task_id: hexOf("another", 16) } }, "of another round, task or bundle"],
    ["a plan of another round", { plan: { round_id: hexOf("another", 16) } }, "of another round, task or bundle"],
    ["a plan of another bundle", { plan: { bundle: hexOf("another") } }, "of another round, task or bundle"],
    ["an evaluation", { plan: { kind: "evaluation" } }, "a secure evaluation round, not of a secure training"],
    ["a late round from nowhere", { plan: LATE }, "not in the server's log"],
    ["a plain plan", { plan: { privacy: "plain" } }, "not of a secure training"],
    ["other weights to begin with", { plan: { weights: hexOf("others") } }, "began with other weights"],
    ["a plan outside the policy", { plan: { threshold: 5 } }, PolicyError as typeof CertificateError],
    ["too few in the sum", { entry: { devices: 3 } }, "survivors; the entry names 3"],
    ["fewer than the plan needs", { entry: { devices: 6 }, survivors: OTHERS.slice(0, 6) }, "the plan needs 7"],
    ["signed for another plan", { confirmation: { plan: hexOf("x") } }, "of another round, plan or survivor"],
    ["signed for other survivors", { confirmation: { survivors: hexOf("x") } }, "of another round, plan or survivor"],
    ["by devices not in the sum", { survivors: OTHERS, confirmation: { survivors: SIGNED } }, "not one of the"],
    ["by devices of other populations", { tokens: { population: "others" } }, "enrolled in others, not in pages"],
    ["one signature many times", { repeated: true }, "1 devices signed that they were in it, 7 are needed"],
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

  describe("over neighbours", () => {
    const OVER = { protocol: "neighbours", neighbours: 8, partners: 8 };

    beforeEach(() => {
      const { manifest } = bundle;
      const privacy = { ...manifest.privacy, protocols: ["complete", "neighbours"] };
      bundle = Object.create(bundle, { manifest: { value: { ...manifest, privacy } } }) as Bundle;
    });

    test("a step that seven devices signed", async () => {
      await check(await log.step("one", await log.start(), { plan: OVER }));
    });

    test.each<[string, Lies, string | typeof CertificateError]>([
      ["too few signatures", { plan: OVER, endorsers: 6 }, "6 devices signed that they were in it, 7 are needed"],
      ["one signature many times", { plan: OVER, repeated: true }, "1 devices signed that they were in it"],
      ["another cohort", { plan: OVER, signedRoot: fixed("another root") }, CertificateError],
      ["a root that is too short", { plan: OVER, root: fixed("root", 31) }, "root has 31 bytes, not 32"],
      ["sizes outside the policy", { plan: { ...OVER, threshold: 6 } }, "threshold 6 of 8 neighbours"],
    ])("%s", async (_, lies, error) => {
      await log.step("one", await log.start(), lies);
      await expect(check(hexOf("weights one"))).rejects.toThrow(error);
    });

    test("a threshold below the number of colluders, who could sign for rounds that never were", () => {
      const plan = { protocol: "neighbours", threshold: 59, colluders: 200 } as RoundPlan;
      expect([endorsersNeeded(plan), endorsersNeeded({ ...plan, protocol: "complete" })]).toEqual([201, 59]);
    });
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
