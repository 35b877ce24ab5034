/** A server that offers versions of models to one device, and has no rounds; any answer can be a lie. */

import { sha256 } from "../src/bundle/digests.js";
import type { Bundle } from "../src/bundle/reader.js";
import { writeWeights } from "../src/bundle/weights.js";
import type { NdArray } from "../src/arrays.js";
import type { Bytes } from "../src/device/bytes.js";
import { required, struct } from "../src/bundle/decoders.js";
import { readDeviceId } from "../src/device/identity.js";
import { decode, encode } from "../src/device/messages/fields.js";
import { type Chain, chain, type Sealed, sealed } from "../src/device/messages/identity.js";
import type { RoundPlan } from "../src/device/messages/rounds.js";
import { seal } from "../src/device/sealed.js";
import { fixed, keyOf, Log, MODEL, POPULATION, problem } from "./device_world.js";

const enrolling = struct<{ chain: Chain; proof: Sealed }>({ chain: required(chain), proof: required(sealed) });

export class OfferServer {
  offers: Sealed[] = [];
  readonly files = new Map<string, Uint8Array>();
  readonly log: Log;
  /** What the device asked for, without its session. */
  requests: string[] = [];
  /** What the check-ins said. */
  readonly reports: { readonly versions?: Record<string, number> }[] = [];
  private serial = 1000;
  readonly plan = null as never as RoundPlan;

  constructor(readonly bundle: Bundle) {
    this.log = new Log(bundle);
    this.files.set(`/v1/bundles/${bundle.digest}`, MODEL.bundle);
  }

  /** Offer this version in place of all that was offered. */
  async offer(version: number, changes: object = {}, by = "server"): Promise<void> {
    this.offers = [await this.sealed(version, changes, by)];
  }

  async sealed(version: number, changes: object = {}, by = "server"): Promise<Sealed> {
    const named = { population: POPULATION, model: "mlp", bundle: this.bundle.digest, serial: ++this.serial };
    return seal("offer", { ...named, version, ...changes }, await keyOf(by));
  }

  /** Weights that rounds in the log have made, each of which can move them by a norm of 1; their digest. */
  async trained(name: string, parameters: ReadonlyMap<string, NdArray>, rounds = 6): Promise<string> {
    const data = writeWeights(parameters);
    const weights = await sha256(data);
    this.files.set(`/v1/blobs/${weights}`, data);
    if (!this.log.entries.length) await this.log.start();
    let parent = await sha256(writeWeights(this.bundle.parameters()));
    for (let round = 1; round < rounds; round++) parent = await this.log.step(`${name} ${round}`, parent);
    await this.log.step(name, parent, { entry: { weights } });
    return weights;
  }

  readonly fetch = async (input: RequestInfo | URL, init: RequestInit = {}): Promise<Response> => {
    const { pathname, search } = new URL(String(input));
    const answer = await this.answer(pathname, search, (init.body ?? new Uint8Array()) as Bytes);
    const headers = { Date: new Date().toUTCString() };
    if (answer !== null) return new Response(answer as BodyInit, { headers });
    return new Response(encode(problem(404, "none")), { status: 404, headers });
  };

  private async answer(path: string, search: string, body: Bytes): Promise<Uint8Array | null> {
    const now = Date.now() / 1000;
    if (path === "/v1/devices") {
      return encode({ device_id: await readDeviceId(decode("enrolment", body, enrolling).chain) });
    }
    if (path === "/v1/challenges") return encode({ nonce: fixed("nonce"), expires: now + 60 });
    if (path === "/v1/sessions") return encode({ token: "t", expires: now + 900 });
    this.requests.push(path + search);
    if (path === "/v1/check-ins") {
      const report = JSON.parse(new TextDecoder().decode(body));
      this.reports.push(report);
      return encode({ retry_after: 0.01, ...(report.versions === undefined ? {} : { offers: this.offers }) });
    }
    if (path.includes("/weights-log/")) return this.log.answer(path + search);
    return this.files.get(path) ?? null;
  }
}
