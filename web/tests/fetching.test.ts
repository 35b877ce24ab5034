/** Files from a busy server, over TCP. */

import { createServer, type IncomingMessage, type Server } from "node:http";
import type { AddressInfo } from "node:net";

import { afterEach, beforeEach, describe, expect, test } from "vitest";

import { fetchPatiently, pauseOf } from "../src/fetching.js";
import { readSource } from "../src/source.js";

let server: Server;
let address: string;
/** What the next requests are refused with, and when they came. */
let refusals: { status: number; after: string | null }[];
let came: number[];

beforeEach(async () => {
  refusals = [];
  came = [];
  server = createServer((_: IncomingMessage, answer) => {
    came.push(Date.now());
    const refusal = refusals.shift();
    if (refusal === undefined) {
      answer.end("the file");
      return;
    }
    if (refusal.after !== null) answer.setHeader("Retry-After", refusal.after);
    answer.writeHead(refusal.status).end("busy");
  });
  await new Promise<void>((resolve) => server.listen(0, "127.0.0.1", resolve));
  address = `http://127.0.0.1:${(server.address() as AddressInfo).port}/file`;
});

afterEach(() => {
  server.closeAllConnections();
  server.close();
});

test("a refused file is asked for again when the server says so, and not before", async () => {
  refusals = [
    { status: 429, after: "1" },
    { status: 503, after: "0" },
  ];
  const response = await fetchPatiently(address);
  expect([response.status, await response.text()]).toEqual([200, "the file"]);
  expect(came.length).toBe(3);
  expect(came[1]! - came[0]!).toBeGreaterThanOrEqual(999);
  expect(came[2]! - came[1]!).toBeLessThan(900);
});

test("a bundle is read so", async () => {
  refusals = [{ status: 429, after: "0" }];
  expect(new TextDecoder().decode(await readSource(address))).toBe("the file");
});

test("a server that is busy for too long, and other refusals, are told", async () => {
  refusals = [{ status: 503, after: "3600" }];
  expect((await fetchPatiently(address)).status).toBe(503);
  refusals = [{ status: 404, after: "1" }];
  expect((await fetchPatiently(address)).status).toBe(404);
  expect(came.length).toBe(2);
});

describe("Retry-After", () => {
  test.each([
    ["7", 7000],
    [" 0 ", 0],
    [null, 1000],
    ["soon", 1000],
    ["Wed, 21 Oct 2015 07:28:00 GMT", 0],
  ])("%s", (header, expected) => expect(pauseOf(header)).toBe(expected));

  test("a date to come", () => {
    const pause = pauseOf(new Date(Date.now() + 60_000).toUTCString());
    expect(pause).toBeGreaterThan(55_000);
    expect(pause).toBeLessThanOrEqual(60_000);
  });
});
