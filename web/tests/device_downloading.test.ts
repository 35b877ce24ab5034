/** A download whose connection breaks goes on where it was, and does not begin anew. */

import { beforeEach, expect, test } from "vitest";

import type { Config } from "../src/device/config.js";
import { RefusedError, TooLargeError, UnreachableError } from "../src/device/errors.js";
import { Transport } from "../src/device/rounds/transport.js";
import { fixed } from "./device_world.js";

const FILE = fixed("file", 1000);
const LIMIT = 1000;

/** What the server answers to each request: all by the rules, or what is in `answers` in its place, one by one. */
let answers: ((from: number) => Response | null)[] = [];
let ranges: (string | null)[] = [];
let waits: number[] = [];

beforeEach(() => {
  [answers, ranges, waits] = [[], [], []];
});

/** The bytes in this range, after so many of which the connection breaks. */
function bytes(from: number, status: number, breaksAfter = Infinity, headers: Record<string, string> = {}): Response {
  const body = FILE.subarray(from);
  let sent = false;
  const stream = new ReadableStream<Uint8Array>({
    pull(controller) {
      if (!sent) controller.enqueue(body.slice(0, breaksAfter));
      else if (breaksAfter < body.length) controller.error(new TypeError("network error"));
      else controller.close();
      sent = true;
    },
  });
  const range = status === 206 ? { "Content-Range": `bytes ${from}-${FILE.length - 1}/${FILE.length}` } : {};
  return new Response(stream, { status, headers: { ...range, ...headers } });
}

async function serve(_: RequestInfo | URL, init?: RequestInit): Promise<Response> {
  const range = new Headers(init?.headers).get("Range");
  ranges.push(range);
  const from = range === null ? 0 : Number(/^bytes=(\d+)-$/.exec(range)![1]);
  const answer = answers.shift()?.(from);
  if (answer === null) throw new TypeError("no connection");
  return answer ?? bytes(from, range === null ? 200 : 206);
}

function transport(): Transport {
  const config = { attempts: 2, backoff: 0.01, maxWait: 1, requestTimeout: 10 } as Config;
  const pause = async (seconds: number): Promise<void> => void waits.push(seconds);
  return new Transport("http://server", config, pause, () => new AbortController().signal, serve);
}

test("only the rest is fetched, however often it breaks", async () => {
  // Five breaks, where two attempts without a byte would end it.
  answers = [0, 1, 2, 3, 4].map((place) => (from) => bytes(from, place === 0 ? 200 : 206, 100));
  const made = transport();
  expect(await made.download("/v1/blobs/1", LIMIT, {})).toEqual(FILE);
  expect(ranges).toEqual([null, "bytes=100-", "bytes=200-", "bytes=300-", "bytes=400-", "bytes=500-"]);
  expect(made.received).toBe(FILE.length);
  expect(waits).toHaveLength(5);
});

test("a server that sends the whole again is read from its beginning", async () => {
  answers = [(from) => bytes(from, 200, 300), () => bytes(0, 200)];
  expect(await transport().download("/v1/blobs/1", LIMIT, {})).toEqual(FILE);
  expect(ranges).toEqual([null, "bytes=300-"]);
});

test.each([
  ["another part", () => bytes(400, 206)],
  ["a part that does not say where it is", () => bytes(300, 206, Infinity, { "Content-Range": "bytes */1000" })],
  ["no such range", () => new Response("{}", { status: 416 })],
])("after %s it begins anew", async (_, answer) => {
  answers = [(from) => bytes(from, 200, 300), answer];
  expect(await transport().download("/v1/blobs/1", LIMIT, {})).toEqual(FILE);
  expect(ranges).toEqual([null, "bytes=300-", null]);
});

test("a server that allows no ranges is asked for the whole", async () => {
  // As a browser has it where the server's answer to its question does not name the header.
  answers = [(from) => bytes(from, 200, 300), () => null, () => null];
  expect(await transport().download("/v1/blobs/1", LIMIT, {})).toEqual(FILE);
  expect(ranges).toEqual([null, "bytes=300-", "bytes=300-", null]);
});

test("what never comes ends", async () => {
  answers = [() => null, () => null];
  await expect(transport().download("/v1/blobs/1", LIMIT, {})).rejects.toThrow(UnreachableError);
  answers = [() => new Response("{}", { status: 404 })];
  await expect(transport().download("/v1/blobs/1", LIMIT, {})).rejects.toThrow(RefusedError);
});

test("parts together are no longer than the limit", async () => {
  answers = [(from) => bytes(from, 200, 300), (from) => bytes(from, 206)];
  await expect(transport().download("/v1/blobs/1", LIMIT - 1, {})).rejects.toThrow(TooLargeError);
});
