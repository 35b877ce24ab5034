/** A device replaces its key, and its page may be loaded again at any point of that. */

import { afterEach, beforeEach, expect, test, vi } from "vitest";

import { required, struct } from "../src/bundle/decoders.js";
import { hex } from "../src/bundle/digests.js";
import type { Bundle } from "../src/bundle/reader.js";
import type { Bytes } from "../src/device/bytes.js";
import { CertificateError, RefusedError } from "../src/device/errors.js";
import { readDeviceId, verifyChain } from "../src/device/identity.js";
import { bytes, decode, digestText, encode, id, key } from "../src/device/messages/fields.js";
import { type Chain, chain, type Sealed, sealed } from "../src/device/messages/identity.js";
import type { RoundPlan } from "../src/device/messages/rounds.js";
import { bodyDigest, unseal } from "../src/device/sealed.js";
import { Tab } from "./device_tab.js";
import { fixed, keyOf, openModel, POPULATION } from "./device_world.js";

const enrolling = struct<{ chain: Chain; proof: Sealed }>({ chain: required(chain), proof: required(sealed) });
const opening = struct<{ device_id: string; proof: Sealed }>({ device_id: required(id), proof: required(sealed) });
const rotating = struct<{ certificate: Sealed; proof: Sealed }>({
  certificate: required(sealed),
  proof: required(sealed),
});
const sessionProof = struct<{ nonce: Bytes; server_key: Bytes }>({
  nonce: required(bytes(32, 32)),
  server_key: required(key),
});
const rotationProof = struct<{ server_key: Bytes; certificate: string }>({
  server_key: required(key),
  certificate: required(digestText),
});

/** A server that knows one device by its chain, and opens sessions for the key at the chain's end alone. */
class KeyServer {
  readonly plan = null as never as RoundPlan;
  chain: Chain | null = null;
  deviceId = "";
  token = 0;
  /** Answers a replacement with this status, or takes it and then breaks the connection off. */
  status = 0;
  lost = false;

  constructor(readonly bundle: Bundle) {}

  get rotations(): number {
    return this.chain?.rotations?.length ?? 0;
  }

  async key(): Promise<Uint8Array> {
    const { publicKey } = await keyOf("enrolment");
    return (await verifyChain(this.chain as Chain, publicKey, { population: POPULATION })).deviceKey;
  }

  readonly fetch = async (input: RequestInfo | URL, init: RequestInit = {}): Promise<Response> => {
    const { pathname } = new URL(String(input));
    const now = Date.now() / 1000;
    const body = (init.body ?? new Uint8Array()) as Bytes;
    const bearer = new Headers(init.headers).get("Authorization");
    if (pathname === "/v1/devices") {
      this.chain = decode("enrolment", body, enrolling).chain;
      this.deviceId = await readDeviceId(this.chain);
      return answer({ device_id: this.deviceId });
    }
    if (pathname === "/v1/challenges") return answer({ nonce: fixed("nonce"), expires: now + 60 });
    if (pathname === "/v1/sessions") {
      try {
        await unseal("session", decode("session", body, opening).proof, await this.key(), sessionProof);
      } catch {
        return answer({ type: "forbidden", message: "another key", request_id: "1" }, 403);
      }
      return answer({ token: `t${++this.token}`, expires: now + 900 });
    }
    if (pathname === `/v1/devices/${this.deviceId}/key`) return this.replace(body);
    // A replaced key ends the sessions that it opened.
    if (bearer !== `Bearer t${this.token}`) {
      return answer({ type: "unauthorized", message: "no session", request_id: "1" }, 401);
    }
    return answer({ retry_after: 0.01 });
  };

  private async replace(body: Bytes): Promise<Response> {
    if (this.status) return answer({ type: "refused", message: "not now", request_id: "1" }, this.status);
    const { certificate, proof } = decode("rotation", body, rotating);
    const known = this.chain as Chain;
    const last = known.rotations?.at(-1);
    if (last === undefined || hex(last.body) !== hex(certificate.body)) {
      this.chain = { ...known, rotations: [...(known.rotations ?? []), certificate] };
      this.token++;
    }
    const { certificate: named } = await unseal("rotated", proof, await this.key(), rotationProof);
    expect(named).toBe(await bodyDigest(certificate));
    if (this.lost) throw new TypeError("the network failed");
    return answer({ device_id: this.deviceId, rotations: this.rotations });
  }
}

function answer(message: object, status = 200): Response {
  return new Response(encode(message), { status, headers: { Date: new Date().toUTCString() } });
}

let server = null as never as KeyServer;
let tab = null as never as Tab<KeyServer>;

async function open(): Promise<void> {
  tab?.agent.close();
  server = new KeyServer(await openModel());
  tab = await Tab.at(server);
  await tab.agent.runOnce();
}

beforeEach(open);

afterEach(() => {
  tab.agent.close();
  vi.restoreAllMocks();
});

test("the key is another and the device the same, eight times", async () => {
  const seen = new Set([hex(await server.key())]);
  for (let number = 1; number <= 8; number++) {
    expect(await tab.agent.rotateKey()).toBe(true);
    expect([server.rotations, tab.agent.deviceId]).toEqual([number, server.deviceId]);
    seen.add(hex(await server.key()));
    expect((await tab.agent.runOnce()).kind).toBe("waiting");
    if (number % 3 === 0) await tab.load();
  }
  expect(seen.size).toBe(9);
  await expect(tab.agent.rotateKey()).rejects.toThrow(CertificateError);
  expect((await tab.agent.runOnce()).kind).toBe("waiting");
  expect(tab.events.filter(({ name }) => name === "rotated").map(({ detail }) => detail.number)).toEqual([
    1, 2, 3, 4, 5, 6, 7, 8,
  ]);
  // No key is left but the present one.
  const kept = await tab.database((database) => database.keys("own"));
  expect(kept.sort()).toEqual(["enrolment", "keys"]);
});

test("a server that cannot do it now is asked at every check-in", async () => {
  server.status = 409;
  expect(await tab.agent.rotateKey()).toBe(false);
  expect((await tab.agent.runOnce()).kind).toBe("waiting");
  await tab.load();
  expect((await tab.agent.runOnce()).kind).toBe("waiting");
  expect(server.rotations).toBe(0);
  server.status = 0;
  expect((await tab.agent.runOnce()).kind).toBe("waiting");
  expect(server.rotations).toBe(1);
});

test("the answer is lost, and so is the page", async () => {
  server.lost = true;
  await expect(tab.agent.rotateKey()).rejects.toThrow("the network failed");
  expect(server.rotations).toBe(1);
  await tab.load();
  server.lost = false;
  expect((await tab.agent.runOnce()).kind).toBe("waiting");
  expect(server.rotations).toBe(1);
  expect(tab.names()).toContain("rotated");
});

test("a reload after any write and any request", async () => {
  const work = async () => {
    await tab.agent.rotateKey();
    return tab.agent.runOnce();
  };
  await tab.load();
  await work();
  const steps = tab.life.done;
  expect(steps).toBeGreaterThan(5);
  for (let most = 1; most < steps; most++) {
    await open();
    await tab.load(most);
    await Promise.race([work(), tab.life.over]);
    await tab.load();
    expect((await tab.agent.runOnce()).kind).toBe("waiting");
    // Its first write is the next key, so it was begun; and the server has taken one key.
    expect(server.rotations).toBe(1);
    expect(tab.agent.deviceId).toBe(server.deviceId);
  }
});

test("a server that has forgotten the new key", async () => {
  const { chain: before } = server;
  await tab.agent.rotateKey();
  await tab.load();
  server.chain = before;
  await expect(tab.agent.runOnce()).rejects.toThrow(RefusedError);
});
