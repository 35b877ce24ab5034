/** Messages of rounds over neighbours: their widths, their limits, and what comes of garbled ones. */

import { readFileSync } from "node:fs";

import { expect, test } from "vitest";

import { hex } from "../src/bundle/digests.js";
import { unhex } from "../src/device/bytes.js";
import { MessageError } from "../src/device/errors.js";
import * as messages from "../src/device/secagg_plus/messages.js";
import { bytes, type Codec, integer, listOf, named, pack, row, unpack } from "../src/device/secagg_plus/msgpack.js";

// The file's shape is that which scripts/make_vectors.py writes.
type Json = any;

const FILE = new URL("../../vectors/protocol/neighbours.json", import.meta.url);
const [DEVICE] = JSON.parse(readFileSync(FILE, "utf8")).malicious.devices as Json[];
const KINDS = {
  draw: messages.INVITATION, deal: messages.NEIGHBOURS, receive: messages.INBOX, mask: messages.PARTNERS,
  confirm: messages.QUESTION, answer: messages.INCLUSIONS,
} as Readonly<Record<string, messages.Kind<unknown>>>;

test("numbers, bytes, lists and maps of each width", () => {
  // The first bytes are those of the MessagePack specification.
  for (const [number, start] of [
    [0, "00"], [127, "7f"], [128, "cc80"], [255, "ccff"], [256, "cd0100"], [65535, "cdffff"], [65536, "ce00010000"],
    [2 ** 32 - 1, "ceffffffff"],
  ] as const) {
    const codec = integer(0, 2 ** 32 - 1);
    expect(hex(pack(number, codec))).toBe(start);
    expect(unpack("number", unhex(start), codec)).toBe(number);
  }
  for (const [size, start] of [[0, "c400"], [255, "c4ff"], [256, "c50100"], [65536, "c600010000"]] as const) {
    const packed = pack(new Uint8Array(size), bytes(1 << 20));
    expect([hex(packed.slice(0, start.length / 2)), packed.length]).toEqual([start, size + start.length / 2]);
    expect(unpack("bytes", packed, bytes(1 << 20))).toHaveLength(size);
  }
  for (const [size, start] of [[0, "90"], [15, "9f"], [16, "dc0010"], [65536, "dd00010000"]] as const) {
    const codec = listOf(integer(0, 9), 1 << 20);
    const packed = pack(new Array<number>(size).fill(7), codec);
    expect(hex(packed.slice(0, start.length / 2))).toBe(start);
    expect(unpack("list", packed, codec)).toEqual(new Array(size).fill(7));
  }
  type Named = { a: number; more: readonly number[] };
  const digit = integer(0, 9);
  const codec = row<{ one: Named }>({ one: named<Named>({ a: digit, more: listOf(digit, 3) }, ["more"]) });
  expect(hex(pack({ one: { a: 1, more: [] } }, codec))).toBe("9181a16101");
  expect(hex(pack({ one: { a: 1, more: [2] } }, codec))).toBe("9182a16101a46d6f72659102");
  expect(unpack("map", unhex("9181a16101"), codec)).toEqual({ one: { a: 1, more: [] } });
});

test.each<[string, string, Codec<any>]>([
  ["a negative number of one byte", "d0ff", integer(0, 2 ** 32)],
  ["a negative number of two bytes", "d1ffff", integer(0, 2 ** 32)],
  ["a negative number of four bytes", "d2ffffffff", integer(0, 2 ** 32)],
  ["a number below the least", "02", integer(3, 9)],
  ["bytes that end too early", "c40201", bytes(8)],
  ["too few bytes", "c40101", bytes(8, 2)],
  ["too many bytes", "c403010203", bytes(2)],
  ["a list that ends too early", "9201", listOf(integer(0, 9), 9)],
  ["a list that is too long", "9201", listOf(integer(0, 9), 1)],
  ["a row that is too short", "91019101", row<{ a: number; b: number }>({ a: integer(0, 9), b: integer(0, 9) })],
  ["something after the message", "0100", integer(0, 9)],
  ["an extension", "d40500", integer(0, 9)],
  ["a name that ends too early", "81a361", named<{ a: number }>({ a: integer(0, 9) })],
])("refused: %s", (_, data, codec) => {
  expect(() => unpack("message", unhex(data), codec)).toThrow(MessageError);
});

test("a message of any garbled bytes is read as it would be written again, or refused", () => {
  let state = 7;
  const next = (below: number): number => {
    // xorshift32
    state ^= state << 13;
    state ^= state >>> 17;
    state ^= state << 5;
    return (state >>> 0) % below;
  };
  let refused = 0;
  for (const [step, kind] of Object.entries(KINDS)) {
    const good = unhex(DEVICE.gets[step]);
    for (let round = 0; round < 400; round++) {
      const copy = Array.from(good);
      // Mostly at the start, where lengths are.
      const at = round % 2 ? next(Math.min(16, copy.length)) : next(copy.length);
      if (next(3)) copy[at] = [0, 0x90, 0xc4, 0xc6, 0xcf, 0xd3, 0xdb, 0xdd, 0xdf, 0xff][next(10)] as number;
      else copy.splice(at, 1 + next(8));
      try {
        // What was read in an odd spelling is written in the shortest one.
        const written = messages.write(kind, messages.read(kind, Uint8Array.from(copy)));
        expect(hex(messages.write(kind, messages.read(kind, written)))).toBe(hex(written));
      } catch (error) {
        expect(error).toBeInstanceOf(MessageError);
        refused++;
      }
    }
  }
  expect(refused).toBeGreaterThan(1000);
});

test("an honest server's largest messages are within the limits, and hardly smaller", () => {
  const plan = { max_cohort: 100, neighbours: 40, partners: 40 } as never;
  const many = (count: number): number[] => new Array<number>(count).fill(65535);
  const blank = (count: number): Uint8Array<ArrayBuffer> => new Uint8Array(count);
  const largest: [messages.Kind<never>, object][] = [
    [messages.INVITATION as never, { size: 65536, root: blank(32), place: 65535 }],
    [messages.NEIGHBOURS as never, { members: new Array(41).fill(blank(8192)), proof: blank(41 * 7 * 32) }],
    [messages.INBOX as never, {
      dealers: many(100), positions: many(100), cipher_keys: blank(3200), dealt: blank(13200),
    }],
    [messages.PARTNERS as never, { gone: many(40), others: many(100), mask_keys: blank(3200) }],
    [messages.QUESTION as never, { present: many(100), left: [] }],
    [messages.INCLUSIONS as never, { neighbours: many(40), signatures: blank(40 * 64) }],
  ];
  for (const [kind, message] of largest) {
    const size = messages.write(kind, message as never).length;
    expect([kind.name, size <= kind.limit(plan), size > 0.5 * kind.limit(plan)]).toEqual([kind.name, true, true]);
  }
});
