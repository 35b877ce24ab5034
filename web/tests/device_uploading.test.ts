/** Large updates go up in parts: what a broken connection costs is one part. */

import { beforeEach, expect, test } from "vitest";

import { sha256 } from "../src/bundle/digests.js";
import { type Bytes, concat } from "../src/device/bytes.js";
import { RefusedError, UnreachableError } from "../src/device/errors.js";
import type { DeviceSession } from "../src/device/rounds/session.js";
import { sendUpdate } from "../src/device/rounds/uploading.js";
import { fixed, hexOf } from "./device_world.js";

const ROUND = hexOf("round", 16);
const SIZES = { whole: 10, part: 4 };
const UPDATE = fixed("update", 15);

/** A server with the rules of archipel/server/http/api/updates.py. `breaks` cuts a request off, before or after it. */
class Server {
  readonly asked: string[] = [];
  readonly parts = new Map<number, Bytes>();
  stored: Bytes | null = null;
  takesParts = true;
  breaks: (what: string) => "before" | "after" | null = () => null;

  async call(
    method: string,
    path: string,
    _: unknown,
    body?: Bytes,
    headers: Record<string, string> = {},
  ): Promise<unknown> {
    const what = `${method} ${path.replace(`/v1/rounds/${ROUND}/update`, "")}`;
    this.asked.push(what);
    const broken = this.breaks(what);
    if (broken === "before") throw new UnreachableError("lost");
    const answer = await this.answer(what, body ?? new Uint8Array(), headers["Digest-SHA256"] ?? "");
    if (broken === "after") throw new UnreachableError("lost");
    return answer;
  }

  private async answer(what: string, body: Bytes, digest: string): Promise<unknown> {
    if (what === "GET /parts") {
      if (!this.takesParts) throw new RefusedError("no such path", 404, null);
      return { held: [...this.parts.keys()] };
    }
    expect(digest).toBe(await sha256(UPDATE));
    if (what === "PUT ") {
      const whole = body.length ? body : concat(...[1, 2, 3, 4].map((number) => this.parts.get(number)!));
      expect(await sha256(whole)).toBe(digest);
      this.stored = whole;
    } else {
      const number = Number(what.replace("PUT /parts/", ""));
      expect(body.length).toBe(number === 4 ? 3 : 4);
      this.parts.set(number, body.slice());
    }
    return { stored: true };
  }
}

let server = new Server();

beforeEach(() => {
  server = new Server();
});

async function send(update: Bytes = UPDATE, sizes = SIZES, answered = (): void => {}): Promise<void> {
  await sendUpdate(server as unknown as DeviceSession, ROUND, update, await sha256(update), answered, sizes);
}

test("a large update is sent in parts, and an empty body stands for them", async () => {
  await send();
  expect(server.asked).toEqual([
    "GET /parts", "PUT /parts/1", "PUT /parts/2", "PUT /parts/3", "PUT /parts/4", "PUT ",
  ]);
  expect(server.stored).toEqual(UPDATE);
});

test("a small one is sent as it is", async () => {
  await send(UPDATE, { whole: 15, part: 4 });
  expect(server.asked).toEqual(["PUT "]);
  expect(server.stored).toEqual(UPDATE);
});

test.each(["before", "after"] as const)("after a break %s a part arrives the rest is sent", async (when) => {
  server.breaks = (what) => (what === "PUT /parts/3" ? when : null);
  await expect(send()).rejects.toThrow(UnreachableError);
  server.breaks = () => null;
  server.asked.length = 0;
  await send();
  const rest = when === "before" ? ["PUT /parts/3", "PUT /parts/4"] : ["PUT /parts/4"];
  expect(server.asked).toEqual(["GET /parts", ...rest, "PUT "]);
  expect(server.stored).toEqual(UPDATE);
});

test("each part that the server has is told, so that a long upload is no silence", async () => {
  const told: number[] = [];
  server.breaks = (what) => (what === "PUT /parts/4" ? "before" : null);
  await expect(send(UPDATE, SIZES, () => told.push(server.parts.size))).rejects.toThrow(UnreachableError);
  expect(told).toEqual([1, 2, 3]);
});

test("a server that takes no parts gets the whole", async () => {
  server.takesParts = false;
  await send();
  expect(server.asked).toEqual(["GET /parts", "PUT "]);
  expect(server.stored).toEqual(UPDATE);
});
