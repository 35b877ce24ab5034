/**
 * The whole agent against a server that lies about plans, bundles and itself; nothing of the round leaves the device.
 */

import { IDBFactory } from "fake-indexeddb";
import { afterEach, beforeEach, expect, test } from "vitest";

import type { NdArray } from "../src/arrays.js";
import { required, struct } from "../src/bundle/decoders.js";
import { sha256 } from "../src/bundle/digests.js";
import { type Bundle, openBundle } from "../src/bundle/reader.js";
import { writeWeights } from "../src/bundle/weights.js";
import { databaseName, DeviceAgent } from "../src/device/agent.js";
import { checkedServer, type DeviceSettings } from "../src/device/config.js";
import { CertificateError, ClientError, MessageError, RefusedError } from "../src/device/errors.js";
import type { DeviceEvent, Outcome } from "../src/device/events.js";
import { readDeviceId } from "../src/device/identity.js";
import { decode, encode } from "../src/device/messages/fields.js";
import { type Chain, chain, type Sealed, sealed } from "../src/device/messages/identity.js";
import { seal } from "../src/device/sealed.js";
import { DeviceDatabase } from "../src/device/storage/database.js";
import {
  fixed, hexOf, keyOf, Log, MODEL, openModel, planOf, POPULATION, problem, PUBLISHER, tokenText,
} from "./device_world.js";
import { withManifest } from "./forge.js";

const enrolling = struct<{ chain: Chain; proof: Sealed }>({ chain: required(chain), proof: required(sealed) });

/** A server that answers what the tests put into it; `requests` is what it was asked. */
class Server {
  plan: object | null = null;
  device: string | null = null;
  readonly files = new Map<string, Uint8Array>();
  readonly statuses = new Map<string, number>();
  readonly requests: string[] = [];
  readonly left: unknown[] = [];
  date = new Date();

  readonly fetch = async (input: RequestInfo | URL, init: RequestInit = {}): Promise<Response> => {
    const [method, path] = [init.method ?? "GET", new URL(String(input)).pathname];
    this.requests.push(`${method} ${path}`);
    const status = this.statuses.get(path);
    if (status !== undefined) {
      const refusal = encode(problem(status, "no"));
      return new Response(refusal, { status, headers: { "Retry-After": "1" } });
    }
    const found = await this.answer(path, (init.body ?? new Uint8Array()) as Uint8Array);
    if (found === null) {
      return new Response(encode(problem(404, "none")), { status: 404 });
    }
    return new Response(found as Uint8Array<ArrayBuffer>, { headers: { Date: this.date.toUTCString() } });
  };

  private async answer(path: string, body: Uint8Array): Promise<Uint8Array | null> {
    if (path === "/v1/devices") {
      const request = decode("enrolment", body, enrolling);
      return encode({ device_id: this.device ?? (await readDeviceId(request.chain)) });
    }
    if (path === "/v1/challenges") return encode({ nonce: fixed("nonce"), expires: this.date.getTime() / 1000 + 60 });
    if (path === "/v1/sessions") return encode({ token: "t", expires: this.date.getTime() / 1000 + 900 });
    if (path === "/v1/check-ins") return encode({ retry_after: 0.02, plan: this.plan ?? undefined });
    if (path.endsWith("/leave")) {
      this.left.push(JSON.parse(new TextDecoder().decode(body)));
      return encode({ stored: true });
    }
    return this.files.get(path) ?? null;
  }
}

const before = globalThis.fetch;
let [server, events] = [new Server(), [] as DeviceEvent[]];
let [bundle, agent] = [null as never as Bundle, null as never as DeviceAgent];

async function open(settings: DeviceSettings = {}): Promise<void> {
  const quick = { attempts: 1, backoff: 0.01, maxWait: 1, pauseSeconds: 0.01, resumeWithin: 0.05 };
  const forbidden = (): never => {
    throw new Error("the examples must not be asked for");
  };
  agent = await DeviceAgent.open(
    { ...quick, ...settings },
    { examples: forbidden, mayWork: null, onEvent: (event) => events.push(event), engine: forbidden },
  );
}

beforeEach(async () => {
  globalThis.indexedDB = new IDBFactory();
  [server, events] = [new Server(), []];
  globalThis.fetch = server.fetch;
  bundle = await openModel();
  server.files.set(`/v1/bundles/${bundle.digest}`, MODEL.bundle);
  await open();
});

afterEach(() => {
  agent.close();
  globalThis.fetch = before;
});

/** Check in, with this plan for the device; what has left it beside check-ins and downloads. */
async function assigned(changes: object = {}, by = "server", label = "plan"): Promise<Outcome> {
  if (!agent.deviceId) await agent.enrol(await tokenText("token"));
  server.plan = await seal(label, await planOf(bundle, changes), await keyOf(by));
  server.requests.length = 0;
  return agent.runOnce();
}

function nothingSent(): void {
  expect(server.requests.filter((request) => request.startsWith("PUT"))).toEqual([]);
}

test.each<[string, object, string, string, string]>([
  ["a plan that another key signed", {}, "somebody", "plan", "the signature does not verify"],
  ["a statement for another purpose", {}, "server", "offer", "the signature does not verify"],
  ["a field that nobody knows", { spy: 1 }, "server", "plan", 'unknown field "spy"'],
  ["a cohort beyond what messages hold", { max_cohort: 5000 }, "server", "plan", "from 1 to 4096"],
  ["a number that is none", { number: 1.5 }, "server", "plan", "an integer"],
])("no plan: %s", async (_, changes, by, label, words) => {
  const outcome = await assigned(changes, by, label);
  expect([outcome.kind, outcome.roundId]).toEqual(["refused", ""]);
  expect(outcome.reason).toContain(words);
  expect((await agent.report()).rounds).toEqual([]);
  nothingSent();
});

test.each<[string, object, string, string]>([
  ["an evaluation", { kind: "evaluation", metrics: { loss: 1 }, min_contributors: 20 }, "kind", "trainings only"],
  ["a plain round", { privacy: "plain", colluders: 0 }, "privacy", "secure ones only"],
  ["a broadcast", { broadcast: hexOf("broadcast") }, "kind", "broadcasts more than weights"],
  ["a plan outside the policy", { threshold: 5 }, "policy", "is below the policy's ratio"],
  ["a protocol that the policy does not allow", { protocol: "neighbours", neighbours: 8, partners: 8 }, "policy",
    "protocol neighbours is not among the allowed complete"],
  ["neighbours in a round over the complete graph", { neighbours: 8 }, "policy", "over the complete graph"],
  ["colluders that the policy does not state", { colluders: 0 }, "policy", "the policy withstands 3"],
  ["a sum that overflows", { modulus_bits: 16 }, "policy", "can overflow"],
  ["a bundle that there is not", { bundle: hexOf("nothing") }, "other", "none (404)"],
  ["weights that there are not", { weights: hexOf("nothing") }, "other", "none (404)"],
  ["a program that there is not", { program: "train" }, "other", "no single finish program"],
  ["revocations that there are not", { revocations: hexOf("nothing") }, "other", "none (404)"],
])("refused: %s", async (_, changes, why, words) => {
  const outcome = await assigned(changes);
  expect(outcome.reason).toContain(words);
  expect(["refused", "dropped"]).toContain(outcome.kind);
  expect(server.left).toEqual([{ reason: why }]);
  // The round is in the journal, and its plan is not taken again.
  expect((await agent.report()).rounds.map((entry) => entry.result)).toEqual([outcome.kind]);
  expect((await agent.runOnce()).kind).toBe("waiting");
  nothingSent();
});

test("limits that the plan alone exceeds cost no download", async () => {
  agent.close();
  await open({ minCohort: 100, tellWhy: false });
  expect((await assigned()).reason).toContain("a cohort of 6 or more, its owner allows 100 (minCohort)");
  expect(server.requests.filter((request) => /bundles|blobs|revocations/.test(request))).toEqual([]);
  expect(server.left).toEqual([{}]);
});

test.each<[DeviceSettings, string]>([
  [{ maxPeakBytes: 1 }, "maxPeakBytes"],
  [{ maxUploadBytes: 1 }, "maxUploadBytes"],
  [{ maxUploadEntries: 1 }, "maxUploadEntries"],
  [{ maxDownloadBytes: 1000 }, "the answer has more than 1000 bytes"],
  [{ maxRoundsPerDay: 0 }, "maxRoundsPerDay"],
  [{ publishers: ["0".repeat(64)] }, "none of the publishers"],
])("the owner's %o", async (settings, words) => {
  agent.close();
  await open(settings);
  const outcome = await assigned();
  expect([outcome.kind, outcome.reason]).toEqual(["refused", expect.stringContaining(words)]);
  expect(server.requests.filter((request) => request.includes("blobs"))).toEqual([]);
});

test("a bundle of somebody else, or another one than the plan names", async () => {
  await agent.enrol(await tokenText("token", { publisher_keys: [(await keyOf("publisher")).publicKey] }));
  expect((await assigned()).reason).toContain("none of the 1 trusted keys signed this manifest");
  expect(server.left).toEqual([{ reason: "publisher" }]);
  await agent.erase();
  await open();
  server.files.set(`/v1/bundles/${hexOf("other")}`, MODEL.bundle);
  const outcome = await assigned({ bundle: hexOf("other"), round_id: hexOf("second", 16), serial: 2 });
  expect(outcome.reason).toContain(`asked for ${hexOf("other")}, the server sent ${bundle.digest}`);
});

/** The model with another manifest of its publisher, on the server; its digest. */
async function published(change: (manifest: any) => void): Promise<string> {
  const file = await withManifest(MODEL.bundle, change);
  const { digest } = await openBundle(file, PUBLISHER, true);
  server.files.set(`/v1/bundles/${digest}`, file);
  return digest;
}

test("a bundle that its publisher made for others, until a day that is over, or has replaced", async () => {
  const plan = async (serial: number, change: (manifest: any) => void): Promise<string> =>
    (await assigned({ serial, round_id: hexOf(`round ${serial}`, 16), bundle: await published(change) })).reason;
  const away = "none (404)";
  expect(await plan(1, (manifest) => (manifest.populations = ["others"]))).toContain("for others, not for pages");
  expect(await plan(2, (manifest) => (manifest.not_after = 1))).toContain("it expired at 1");
  expect(server.left).toEqual([{ reason: "policy" }, { reason: "policy" }]);
  // These are taken, and the weights are what is missing.
  const good = (manifest: any) => Object.assign(manifest, { populations: [POPULATION], not_after: 4_000_000_000 });
  expect(await plan(3, good)).toContain(away);
  expect(await plan(4, (manifest) => (manifest.sequence = 2))).toContain(away);
  agent.close();
  await open();
  expect(await plan(5, (manifest) => (manifest.sequence = 1))).toContain("its publisher replaced what is below 2");
  expect(await plan(6, good)).toContain("its publisher replaced what is below 2");
  expect(await plan(7, (manifest) => (manifest.sequence = 2))).toContain(away);
});

test("an old plan is refused, by whichever clock, and a plan is taken once", async () => {
  server.date = new Date(4_000_000_001_000);
  expect((await assigned()).reason).toContain("at the server it is 4000000001");
  server.date = new Date();
  expect((await assigned({ threshold: 5 })).kind).toBe("refused");
  const again = await assigned({ threshold: 5, round_id: hexOf("another", 16) });
  expect(again.reason).toContain("its serial is 1, this device has had 1 of its task");
});

test("revocations only grow", async () => {
  const list = async (
    epoch: number, devices: string[], population = POPULATION, tokens: string[] = [], by = "server",
  ): Promise<string> => {
    const data = encode(await seal("revocations", { population, epoch, devices, tokens }, await keyOf(by)));
    const digest = await sha256(data);
    server.files.set(`/v1/blobs/${digest}`, data);
    return digest;
  };
  const [gone, other] = [hexOf("gone", 16), hexOf("other", 16)];
  // The policy refuses each of these plans after the list was read.
  const plan = async (revocations: string | null, serial: number): Promise<string> =>
    (await assigned({ revocations, serial, threshold: 5, round_id: hexOf(`round ${serial}`, 16) })).reason;
  const first = await list(2, [gone]);
  expect(await plan(await list(1, [gone], "others"), 1)).toContain('for population others');
  expect(await plan(first, 2)).toContain("policy's ratio");
  expect(await plan(await list(3, [other]), 3)).toContain(`device ${gone} is not in the server's list any more`);
  expect(await plan(await list(1, [gone, other]), 4)).toContain("this device has seen epoch 2");
  expect(await plan(null, 5)).toContain("it never goes back");
  expect(await plan(await list(3, [gone, other], POPULATION, [gone]), 6)).toContain("policy's ratio");
  expect(await plan(await list(4, [gone, other], POPULATION, [other]), 7)).toContain(`token ${gone} is not in`);
  expect(await plan(await list(4, [gone, other], POPULATION, [gone], "somebody"), 8)).toContain("does not verify");
  // What was seen outlasts a reload.
  agent.close();
  await open();
  expect(await plan(null, 9)).toContain("it never goes back");
});

test("enrolment", async () => {
  for (const [text, error] of [
    ["no token", MessageError],
    [await tokenText("token", { population: "others" }), CertificateError],
    [await tokenText("token", { seed: fixed("another") }), CertificateError],
    [await tokenText("token", { enrolment_key: fixed("another") }), CertificateError],
    [await tokenText("token", { server: "http://federation.example" }), ClientError],
  ] as const) {
    await expect(agent.enrol(text)).rejects.toThrow(error);
  }
  await expect(agent.enrol("{}")).rejects.toThrow(/not an enrolment token; choose the file .*"server" is missing/);
  expect(server.requests).toEqual([]);
  server.device = "0".repeat(32);
  await expect(agent.enrol(await tokenText("token"))).rejects.toThrow("the server answered for device 000");
  server.device = null;
  const id = await agent.enrol(await tokenText("token"));
  await expect(agent.enrol(await tokenText("other", { server_key: fixed("x") }))).rejects.toThrow("enrolled already");
  agent.close();
  await open();
  expect(agent.deviceId).toBe(id);
});

test("a server that refuses or is away is an error, and one that cannot answer now is asked again", async () => {
  await agent.enrol(await tokenText("token"));
  server.statuses.set("/v1/check-ins", 404);
  await expect(agent.runForever()).rejects.toThrow(RefusedError);
  server.statuses.set("/v1/check-ins", 503);
  const running = agent.runForever();
  while (server.requests.filter((request) => request.endsWith("check-ins")).length < 3) {
    await new Promise((done) => setTimeout(done, 5));
  }
  agent.stop();
  await running;
});

test("the server may keep back the check-ins of a device that goes on for ever", async () => {
  await agent.enrol(await tokenText("token"));
  const waits: (number | undefined)[] = [];
  // What happens to the first, second, ... of them.
  const happens = ["cut", "answered", "answered", "held"];
  const { fetch } = server;
  let held: () => void = () => undefined;
  const isHeld = new Promise<void>((resolve) => (held = resolve));
  globalThis.fetch = async (input, init = {}) => {
    if (!String(input).endsWith("/check-ins")) return fetch(input, init);
    waits.push(JSON.parse(new TextDecoder().decode(init.body as Uint8Array)).wait);
    const what = happens[waits.length - 1];
    if (what === "cut") throw new TypeError("the connection was cut off");
    if (what !== "held") return fetch(input, init);
    held();
    return new Promise((_, reject) => init.signal?.addEventListener("abort", () => reject(init.signal?.reason)));
  };
  agent.close();
  await open();
  const running = agent.runForever();
  while (waits.length < 3) await new Promise((done) => setTimeout(done, 5));
  agent.stop();
  await running;
  // Cut off at once, so it does not ask again for an hour.
  expect(waits.slice(0, 3)).toEqual([20, undefined, undefined]);
  agent.close();
  await open({ waitSeconds: 7 });
  [waits.length, happens.length] = [0, 0];
  happens.push("answered", "held");
  await agent.runOnce();
  expect(waits).toEqual([undefined]);
  const again = agent.runForever();
  await isHeld;
  expect(waits).toEqual([undefined, 7]);
  // Where it is stopped it does not wait for the answer.
  agent.stop();
  await again;
  expect(waits).toHaveLength(2);
});

test("addresses", () => {
  expect(checkedServer("https://federation.example:8443/", false)).toBe("https://federation.example:8443");
  expect(checkedServer("http://127.0.0.1:8470", false)).toBe("http://127.0.0.1:8470");
  expect(checkedServer("http://federation.example", true)).toBe("http://federation.example");
  for (const wrong of ["host", "http://federation.example", "https://me:you@host", "ftp://host", "https://h/?a=1"]) {
    expect(() => checkedServer(wrong, false)).toThrow(ClientError);
  }
});

test("weights that the server's log does not have are refused before anything is computed", async () => {
  const ones = (array: NdArray): NdArray => ({ ...array, data: array.data.slice().fill(1 as never) });
  const file = writeWeights(new Map([...bundle.parameters()].map(([name, array]) => [name, ones(array)])));
  const weights = await sha256(file);
  server.files.set(`/v1/blobs/${weights}`, file);
  server.files.set(`/v1/populations/${POPULATION}/weights-log/${bundle.digest}`, encode({ entries: [], newest: 0 }));
  expect((await assigned({ weights })).reason).toContain("not in the server's log");
  expect(server.left).toEqual([{ reason: "policy" }]);
});

test("weights that no step of the bundle's can have made", async () => {
  const own = bundle.parameters();
  const [name, array] = [...own][0]!;
  const with_ = (data: number): NdArray => ({ ...array, data: array.data.slice().fill(data as never) });
  const flat = { ...array, dims: [array.data.length, 1] };
  for (const [serial, [changed, words]] of (
    [
      [new Map([...own, [name, with_(Number.NaN)]]), "no finite numbers"],
      [new Map([...own, [name, with_(Number.POSITIVE_INFINITY)]]), "no finite numbers"],
      [new Map([...own, [name, flat]]), `expected ${array.dtype}[${array.dims}]`],
      [new Map([...own].slice(1)), "is missing"],
      [new Map([...own, ["spy", array]]), `tensor "spy" is not one of the bundle's`],
    ] as const
  ).entries()) {
    const file = writeWeights(changed);
    const weights = await sha256(file);
    server.files.set(`/v1/blobs/${weights}`, file);
    server.left.length = 0;
    const outcome = await assigned({ weights, serial: serial + 1, round_id: hexOf(`round ${serial}`, 16) });
    expect([outcome.kind, outcome.reason]).toEqual(["refused", expect.stringContaining(words)]);
    expect(server.left).toEqual([{ reason: "policy" }]);
  }
});

test("weights that the device used before are what it measures new ones from", async () => {
  const log = new Log(bundle);
  /** The agent is assigned weights of the log, the bundle's moved so far, of which entries after `seen` are new. */
  const trained = async (name: string, distance: number, parent: string, seen: number): Promise<string> => {
    const own = bundle.parameters();
    const [first, array] = [...own][0]!;
    const data = (array.data as Float32Array).slice();
    data[0] = data[0]! + distance;
    const file = writeWeights(new Map([...own, [first, { ...array, data }]]));
    const weights = await sha256(file);
    server.files.set(`/v1/blobs/${weights}`, file);
    await log.step(name, parent, { entry: { weights } });
    const url = `/v1/populations/${POPULATION}/weights-log/${bundle.digest}`;
    server.files.set(url, encode({ entries: log.entries.slice(seen), newest: log.entries.length }));
    const { length } = log.entries;
    server.files.set(`${url}/${length}/endorsement`, encode(log.evidence.get(length) as object));
    return weights;
  };
  const next = (weights: string, serial: number): Promise<Outcome> =>
    assigned({ weights, serial, round_id: hexOf(`round ${serial}`, 16) });
  // A step of the model goes about 1 far. With every check passed, the examples are asked for.
  const one = await trained("one", -0.9, await log.start(), 0);
  await expect(next(one, 1)).rejects.toThrow("the examples must not be asked for");
  const two = await trained("two", 1.5, one, 2);
  expect((await next(two, 2)).reason).toContain("2.400 away from weights that this device knows");
  // What is damaged cannot be measured from.
  const database = await DeviceDatabase.open(databaseName("device"));
  const kept = (await database.get<Uint8Array>("files", one)) as Uint8Array;
  kept[kept.length - 1]! ^= 1;
  await database.write({ store: "files", key: one, value: kept });
  database.close();
  const url = `/v1/populations/${POPULATION}/weights-log/${bundle.digest}`;
  server.files.set(url, encode({ entries: [], newest: log.entries.length }));
  await expect(next(two, 3)).rejects.toThrow("the examples must not be asked for");
});

test("the bundle's own weights are read as they were published", async () => {
  // What the refusals above rely on: with every check passed, the examples are asked for.
  server.files.set(`/v1/blobs/${(await planOf(bundle)).weights as string}`, writeWeights(bundle.parameters()));
  await expect(assigned()).rejects.toThrow("the examples must not be asked for");
  nothingSent();
});
