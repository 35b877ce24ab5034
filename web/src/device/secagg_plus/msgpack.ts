/**
 * MessagePack, as far as rounds over neighbours use it: arrays, whole numbers, bytes, and maps with known names.
 *
 * A codec reads what `msgspec` reads in Python, and writes the bytes that it writes. It accepts no more and no less: a
 * member that only one of the two accepted would end the round for some of its neighbours. Lengths are checked before
 * anything is allocated.
 */

import { type Bytes, concat, utf8 } from "../bytes.js";
import { MessageError } from "../errors.js";

/** Reads one kind of value at the reader's place, and writes it. */
export interface Codec<T> {
  readonly read: (from: Reader, where: string) => T;
  readonly write: (to: Writer, value: T) => void;
}

/** The value in `data`, read strictly. Raises MessageError, which begins with `what`. */
export function unpack<T>(what: string, data: Uint8Array, codec: Codec<T>): T {
  const reader = new Reader(what, data);
  const value = codec.read(reader, "");
  if (reader.left) reader.fail("something follows the message", "");
  return value;
}

export function pack<T>(value: T, codec: Codec<T>): Bytes {
  const writer = new Writer();
  codec.write(writer, value);
  return writer.bytes;
}

// --- codecs ---------------------------------------------------------------------------------------------------------

export function integer(least: number, most: number): Codec<number> {
  return {
    read: (from, where) => {
      const number = from.integer(where);
      if (number < least || number > most) from.fail(`expected ${least} to ${most}, got ${number}`, where);
      return number;
    },
    write: (to, number) => to.integer(number),
  };
}

export function bytes(most: number, least = 0): Codec<Bytes> {
  return {
    read: (from, where) => from.bytes(least, most, where),
    write: (to, value) => to.bytesOf(value),
  };
}

export function listOf<T>(item: Codec<T>, most: number): Codec<readonly T[]> {
  return {
    read: (from, where) => {
      const count = from.array(most, where);
      return Array.from({ length: count }, (_, index) => item.read(from, `${where}[${index}]`));
    },
    write: (to, items) => {
      to.array(items.length);
      for (const each of items) item.write(to, each);
    },
  };
}

export type CodecsOf<T> = { readonly [K in keyof T]-?: Codec<Exclude<T[K], undefined>> };

/** An array of exactly these fields, in this order and without their names. */
export function row<T extends object>(fields: CodecsOf<T>): Codec<T> {
  const entries = Object.entries(fields) as [string, Codec<unknown>][];
  return {
    read: (from, where) => {
      const count = from.array(entries.length, where);
      if (count < entries.length) from.fail(`expected ${entries.length} fields, got ${count}`, where);
      return Object.fromEntries(entries.map(([name, codec]) => [name, codec.read(from, `${where}.${name}`)])) as T;
    },
    write: (to, value) => {
      to.array(entries.length);
      for (const [name, codec] of entries) codec.write(to, value[name as keyof T]);
    },
  };
}

/** A map of exactly these fields. Of those in `optional`, which are lists, an empty one may be missing. */
export function named<T extends object>(fields: CodecsOf<T>, optional: readonly (keyof T)[] = []): Codec<T> {
  const codecs = new Map(Object.entries(fields) as [string, Codec<unknown>][]);
  const mayMiss = new Set(optional as readonly string[]);
  return {
    read: (from, where) => {
      const found: Record<string, unknown> = {};
      for (let left = from.map(where); left; left--) {
        const name = from.text(where);
        const codec = codecs.get(name);
        if (codec === undefined) return from.fail(`unknown field ${JSON.stringify(name.slice(0, 64))}`, where);
        // Of a field that comes twice the last one counts, as for the other readers.
        found[name] = codec.read(from, `${where}.${name}`);
      }
      for (const name of codecs.keys()) {
        if (name in found) continue;
        if (!mayMiss.has(name)) from.fail(`field ${name} is missing`, where);
        found[name] = [];
      }
      return found as T;
    },
    write: (to, value) => {
      const there = [...codecs].filter(
        ([name]) => !mayMiss.has(name) || (value[name as keyof T] as readonly unknown[] | undefined)?.length,
      );
      to.map(there.length);
      for (const [name, codec] of there) {
        to.text(name);
        codec.write(to, value[name as keyof T]);
      }
    },
  };
}

// --- bytes ----------------------------------------------------------------------------------------------------------

/** Goes through the bytes of one message. */
export class Reader {
  private at = 0;
  private readonly view: DataView;

  constructor(
    private readonly what: string,
    private readonly data: Uint8Array,
  ) {
    this.view = new DataView(data.buffer, data.byteOffset, data.byteLength);
  }

  /** The bytes that are still to be read. */
  get left(): number {
    return this.data.length - this.at;
  }

  integer(where: string): number {
    const head = this.number(1, where);
    if (head < 0x80) return head;
    // The widths of 0xcc ... 0xcf and 0xd0 ... 0xd3 are 1, 2, 4, 8 bytes.
    if (head >= 0xcc && head <= 0xcf) return this.number(1 << (head - 0xcc), where);
    if (head >= 0xd0 && head <= 0xd3) {
      const width = 1 << (head - 0xd0);
      const number = this.number(width, where);
      return number < 2 ** (8 * width - 1) ? number : -1;
    }
    if (head >= 0xe0) return head - 0x100;
    return this.fail("expected a number", where);
  }

  bytes(least: number, most: number, where: string): Bytes {
    const head = this.number(1, where);
    if (head < 0xc4 || head > 0xc6) this.fail("expected bytes", where);
    const size = this.number(1 << (head - 0xc4), where);
    if (size < least || size > most) this.fail(`expected ${least} to ${most} bytes, got ${size}`, where);
    return this.take(size, where);
  }

  text(where: string): string {
    const head = this.number(1, where);
    let size: number;
    if (head >= 0xa0 && head <= 0xbf) size = head - 0xa0;
    else if (head >= 0xd9 && head <= 0xdb) size = this.number(1 << (head - 0xd9), where);
    else return this.fail("expected a name", where);
    return new TextDecoder().decode(this.take(size, where));
  }

  /** Begins an array, and gives the number of its items. */
  array(most: number, where: string): number {
    return this.count([0x90, 0xdc], most, "an array", where);
  }

  /** Begins a map, and gives the number of its entries. */
  map(where: string): number {
    return this.count([0x80, 0xde], this.left, "a map", where);
  }

  fail(why: string, where: string): never {
    throw new MessageError(`${this.what}${where}: ${why}`);
  }

  private count([fixed, wide]: readonly [number, number], most: number, expected: string, where: string): number {
    const head = this.number(1, where);
    let count: number;
    if (head >= fixed && head < fixed + 16) count = head - fixed;
    else if (head === wide || head === wide + 1) count = this.number(head === wide ? 2 : 4, where);
    else return this.fail(`expected ${expected}`, where);
    // Each item has a byte at least, so nothing is allocated for what cannot be there.
    if (count > most || count > this.left) this.fail(`${expected} of ${count}, expected ${most} at most`, where);
    return count;
  }

  /** Big-endian, of 1, 2, 4 or 8 bytes; one above 2^53 is not exact, and above every bound. */
  private number(width: number, where: string): number {
    if (this.left < width) this.fail("it ends too early", where);
    const at = this.at;
    this.at += width;
    if (width === 8) return this.view.getUint32(at) * 2 ** 32 + this.view.getUint32(at + 4);
    if (width === 4) return this.view.getUint32(at);
    return width === 2 ? this.view.getUint16(at) : this.view.getUint8(at);
  }

  private take(size: number, where: string): Bytes {
    if (this.left < size) this.fail("it ends too early", where);
    this.at += size;
    return new Uint8Array(this.data.subarray(this.at - size, this.at));
  }
}

/** Writes each value in the shortest form. */
export class Writer {
  private readonly parts: Uint8Array[] = [];

  get bytes(): Bytes {
    return concat(...this.parts);
  }

  integer(number: number): void {
    if (number < 0x80) this.head(number, 0, 0);
    else if (number < 2 ** 8) this.head(0xcc, number, 1);
    else if (number < 2 ** 16) this.head(0xcd, number, 2);
    else this.head(0xce, number, 4);
  }

  bytesOf(value: Uint8Array): void {
    const width = widthOf(value.length);
    this.head(0xc4 + Math.log2(width), value.length, width);
    this.parts.push(value);
  }

  /** Of fewer than 32 bytes. */
  text(value: string): void {
    const encoded = utf8(value);
    this.head(0xa0 + encoded.length, 0, 0);
    this.parts.push(encoded);
  }

  array(count: number): void {
    this.count(0x90, 0xdc, count);
  }

  map(count: number): void {
    this.count(0x80, 0xde, count);
  }

  private count(fixed: number, wide: number, count: number): void {
    if (count < 16) this.head(fixed + count, 0, 0);
    else if (count < 2 ** 16) this.head(wide, count, 2);
    else this.head(wide + 1, count, 4);
  }

  private head(first: number, number: number, width: number): void {
    const part = new Uint8Array(1 + width);
    part[0] = first;
    for (let index = 0; index < width; index++) part[width - index] = (number / 2 ** (8 * index)) & 0xff;
    this.parts.push(part);
  }
}

function widthOf(size: number): 1 | 2 | 4 {
  if (size < 2 ** 8) return 1;
  return size < 2 ** 16 ? 2 : 4;
}
