/** Files from a busy server, over TCP. */

import { createServer, type IncomingMessage, type Server } from "node:http";
import type { AddressInfo } from "node:net";

import { afterEach, beforeEach, describe, expect, test } from "vitest";

import { fetchPatiently, pauseOf } from "../src/fetching.js";
import { ArchiveError } from "../src/errors.js";
import { type DownloadProgress, readSource } from "../src/source.js";

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

describe("a bundle that is downloaded", () => {
  const text = (bytes: Uint8Array): string => new TextDecoder().decode(bytes);

  test("may be a URL or a Response, and its progress is told", async () => {
    const seen: DownloadProgress[] = [];
    const onProgress = (progress: DownloadProgress): void => void seen.push(progress);
    expect(text(await readSource(new URL(address), { onProgress }))).toBe("the file");
    expect(seen.at(-1)).toEqual({ loaded: 8, total: 8 });
    const response = await fetch(address);
    expect(text(await readSource(response, { onProgress }))).toBe("the file");
    await expect(readSource(response)).rejects.toThrow(/has been read already/);
    expect(text(await readSource(new Response("the file"), { onProgress }))).toBe("the file");
    expect(seen.at(-1)).toEqual({ loaded: 8, total: null });
    refusals = [{ status: 404, after: null }];
    await expect(readSource(await fetch(address))).rejects.toThrow(ArchiveError);
  });

  test("ends with what the callback raises", async () => {
    const onProgress = (): never => {
      throw new TypeError("no such bar");
    };
    await expect(readSource(address, { onProgress })).rejects.toThrow(new TypeError("no such bar"));
  });

  test("can be aborted: before, while the server is busy, while it sends", async () => {
    await expect(readSource(address, { signal: AbortSignal.abort() })).rejects.toThrow(/aborted/);
    expect(came).toEqual([]);
    refusals = [{ status: 503, after: "60" }];
    await expect(readSource(address, { signal: AbortSignal.timeout(50) })).rejects.toThrow(/timeout/);
    const endless = new Response(new ReadableStream({ start: (out) => out.enqueue(new Uint8Array(4)) }));
    await expect(readSource(endless, { signal: AbortSignal.timeout(50) })).rejects.toThrow(/timeout/);
  });

  test("is not there, or breaks off", async () => {
    server.close();
    server.closeAllConnections();
    await expect(readSource(address)).rejects.toThrow(/cannot be fetched/);
    const broken = new Response(new ReadableStream({ pull: (out) => out.error(new TypeError("network error")) }));
    await expect(readSource(broken)).rejects.toThrow(/broke off after 0 bytes \(network error\)/);
  });
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
