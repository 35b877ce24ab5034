/** Keys, devices, plans and a server's log for tests, in which any part can be replaced by a lie. */

import { createHash } from "node:crypto";

import type { Decoder } from "../src/bundle/decoders.js";
import { hex, sha256 } from "../src/bundle/digests.js";
import { type Bundle, openBundle } from "../src/bundle/reader.js";
import { writeWeights } from "../src/bundle/weights.js";
import { concat, label, unhex } from "../src/device/bytes.js";
import { sign, type SigningKey, signingKeyOf } from "../src/device/crypto.js";
import { deviceIdOf } from "../src/device/identity.js";
import { decode, encode } from "../src/device/messages/fields.js";
import type { Chain, Sealed } from "../src/device/messages/identity.js";
import { bodyDigest, seal } from "../src/device/sealed.js";
import { keyBytes } from "../src/source.js";
import { fixture } from "./fixture.js";

export const POPULATION = "pages";
export const MODEL = fixture("mlp");
export const PUBLISHER = keyBytes([MODEL.numbers.publicKey]);

export function fixed(name: string, count = 32): Uint8Array<ArrayBuffer> {
  const hash = createHash("shake256", { outputLength: count }).update(`archipel device world: ${name}`);
  return new Uint8Array(hash.digest());
}

export function keyOf(name: string): Promise<SigningKey> {
  return signingKeyOf(fixed(name));
}

export const hexOf = (name: string, count = 32): string => hex(fixed(name, count));

/** A token of population `POPULATION`, and the chain of the device that enrolled with it; `changes` are the token's. */
export async function chainOf(
  device: SigningKey,
  token: string,
  enrolment = "enrolment",
  changes: object = {},
): Promise<Chain> {
  const tokenKey = await keyOf(token);
  const named = { kind: "device", population: POPULATION, not_after: 4_000_000_000, ...changes };
  const kept = { token_key: tokenKey.publicKey, ...named };
  return {
    token: await seal("token", kept, await keyOf(enrolment)),
    identity: await seal("identity", { device_key: device.publicKey }, tokenKey),
  };
}

/** The text of a token file. */
export async function tokenText(name: string, changes: object = {}): Promise<string> {
  const certificate = (await chainOf(await keyOf("anybody"), name)).token;
  const token = {
    server: "http://127.0.0.1:8470",
    server_key: (await keyOf("server")).publicKey,
    enrolment_key: (await keyOf("enrolment")).publicKey,
    publisher_keys: PUBLISHER,
    population: POPULATION,
    seed: fixed(name),
    certificate,
    ...changes,
  };
  return new TextDecoder().decode(encode(token));
}

export function openModel(): Promise<Bundle> {
  return openBundle(MODEL.bundle, PUBLISHER, true);
}

export function ownWeights(bundle: Bundle): Promise<string> {
  return sha256(writeWeights(bundle.parameters()));
}

/** A plan within the policy of the model; fields with default values are left out. */
export async function planOf(bundle: Bundle, changes: object = {}): Promise<Record<string, unknown>> {
  return {
    round_id: hexOf("round", 16), task_id: hexOf("task", 16), number: 1, bundle: bundle.digest,
    weights: await ownWeights(bundle), privacy: "secure", min_cohort: 6, max_cohort: 9, threshold: 7, modulus_bits: 24,
    colluders: 3, serial: 1, not_after: 4_000_000_000, ...changes,
  };
}

/** What is true of a step, and what a server may say instead. */
export interface Lies {
  readonly entry?: object;
  readonly plan?: object;
  readonly planBy?: string;
  readonly confirmation?: object;
  /** Of the cohort of a round over neighbours: what the server shows, and what the devices signed. */
  readonly root?: Uint8Array;
  readonly signedRoot?: Uint8Array;
  readonly survivors?: readonly string[];
  readonly endorsers?: number;
  /** One signature in the place of all. */
  readonly repeated?: boolean;
  readonly enrolment?: string;
  /** Of the devices' token certificates. */
  readonly tokens?: object;
  readonly signedBy?: string;
  readonly sealedBy?: string;
}

/** The server's log of the model, as it grows, with the evidence for its steps. */
export class Log {
  readonly entries: Sealed[] = [];
  readonly evidence = new Map<number, object>();
  shown: number | null = null;

  constructor(readonly bundle: Bundle) {}

  async start(changes: object = {}): Promise<string> {
    const weights = await ownWeights(this.bundle);
    await this.add({ kind: "start", weights, task_id: hexOf("task", 16), ...changes });
    return weights;
  }

  /** A round that changes `parent` into new weights, of nine devices of which seven signed. */
  async step(name: string, parent: string, lies: Lies = {}): Promise<string> {
    const weights = hexOf(`weights ${name}`);
    const round_id = hexOf(`round ${name}`, 16);
    const sealed = await seal(
      "plan",
      await planOf(this.bundle, { round_id, weights: parent, ...lies.plan }),
      await keyOf(lies.planBy ?? "server"),
    );
    const plan = await bodyDigest(sealed);
    const keys = await Promise.all(Array.from({ length: 7 }, (_, index) => keyOf(`endorser ${index}`)));
    const devices = (await Promise.all(keys.map((key) => deviceIdOf(key.publicKey)))).sort();
    const survivors = { devices: lies.survivors ?? devices };
    const said = encode({
      round_id, plan, cohort: hexOf("cohort"), complaints: hexOf("complaints"),
      survivors: await sha256(encode({ devices })), ...lies.confirmation,
    });
    const [root, signedRoot] = [lies.root ?? fixed("root"), lies.signedRoot ?? lies.root ?? fixed("root")];
    const over = (lies.plan as { protocol?: string } | undefined)?.protocol === "neighbours";
    const [confirmation, signed] = over
      ? [root, concat(label("present", 2), unhex(round_id + plan), signedRoot)]
      : [said, concat(label("confirmation"), said)];
    const endorsers = await Promise.all(
      keys.slice(0, lies.endorsers ?? 7).map(async (_, at) => {
        const index = lies.repeated ? 0 : at;
        const key = keys[index] as SigningKey;
        const chain = await chainOf(key, `endorser's token ${index}`, lies.enrolment, lies.tokens);
        const signing = lies.signedBy === undefined ? key : await keyOf(lies.signedBy);
        return { chain, signature: await sign(signing, signed) };
      }),
    );
    const entry = { kind: "step", weights, task_id: hexOf("task", 16), parent, round_id, plan, devices: 7 };
    await this.add({ ...entry, ...lies.entry }, lies.sealedBy);
    this.evidence.set(this.entries.length, { plan: sealed, survivors, confirmation, endorsers });
    return weights;
  }

  async add(changes: object, by = "server"): Promise<void> {
    const last = this.entries.at(-1);
    const entry = {
      population: POPULATION,
      bundle: this.bundle.digest,
      number: this.entries.length + 1,
      previous: last === undefined ? "0".repeat(64) : await bodyDigest(last),
      ...changes,
    };
    this.entries.push(await seal("weights", entry, await keyOf(by)));
  }

  /** What the server answers, strictly decoded as everything that it sends. */
  readonly call = async <T>(_: string, path: string, decoder: Decoder<T>): Promise<T> =>
    decode(path, this.answer(path), decoder);

  answer(path: string): Uint8Array<ArrayBuffer> {
    const found = /\/(\d+)\/endorsement$/.exec(path);
    if (found !== null) return encode(this.evidence.get(Number(found[1])) ?? {});
    const after = Number(/after=(\d+)$/.exec(path)?.[1]);
    const newest = this.shown ?? this.entries.length;
    return encode({ entries: this.entries.slice(after, Math.min(newest, after + 256)), newest });
  }
}

/** The error shape, as a server of a test answers with it. */
export function problem(status: number, detail: string): object {
  return { type: "urn:archipel:problem:any", title: "any", status, detail, request_id: "1" };
}
