/**
 * Protocol Buffers' wire format, read strictly: nothing is skipped, nothing is copied, nothing is read twice.
 *
 * A lenient reader skips what it does not know and lets the last of two values win; then two readers can disagree about
 * what a file says, and the one that checks is not the one that runs. So here a field that the table does not have,
 * another wire type, a second value of a singular field and a number in more bytes than it needs are errors. The same
 * as archipel/bundle/graphs/wire.py. Format: https://protobuf.dev/programming-guides/encoding/
 */

export const VARINT = 0;
export const FIXED64 = 1;
export const BYTES = 2;
export const FIXED32 = 5;
/** Fields in one file, all messages together: what bounds the memory that reading takes. */
export const MAX_FIELDS = 2_000_000;

/** Where the bytes of a string, a message or a packed list lie: first, and one past the last. */
export type Span = readonly [first: number, stop: number];

/** `refused` says why a known field may not be there. */
export interface Field {
  readonly name: string;
  readonly wire: number;
  readonly repeated: boolean;
  readonly refused: string;
}

/** A message's fields by tag: number * 8 + wire type. */
export type Table = ReadonlyMap<number, Field>;

/** Not what a strict reader takes; the text says what, and at which byte. */
export class WireError extends Error {
  override name = "WireError";
}

/** The fields of one message by name. */
export class Message {
  private readonly numbers = new Map<string, number>();
  private readonly spans = new Map<string, Span>();
  private readonly lists = new Map<string, (number | Span)[]>();

  has(name: string): boolean {
    return this.numbers.has(name) || this.spans.has(name) || this.lists.has(name);
  }

  get names(): string[] {
    return [...this.numbers.keys(), ...this.spans.keys(), ...this.lists.keys()];
  }

  /** A varint; 0 where there is none. Beyond 2^53 the nearest number that there is. */
  number(name: string): number {
    return this.numbers.get(name) ?? 0;
  }

  span(name: string): Span | undefined {
    return this.spans.get(name);
  }

  numbersOf(name: string): readonly number[] {
    return (this.lists.get(name) ?? []) as number[];
  }

  spansOf(name: string): readonly Span[] {
    return (this.lists.get(name) ?? []) as Span[];
  }

  /** Adds a value; false where a singular field has one already. */
  add(field: Field, value: number | Span): boolean {
    if (field.repeated) {
      const list = this.lists.get(field.name);
      if (list === undefined) this.lists.set(field.name, [value]);
      else list.push(value);
      return true;
    }
    if (this.has(field.name)) return false;
    if (typeof value === "number") this.numbers.set(field.name, value);
    else this.spans.set(field.name, value);
    return true;
  }
}

/** Reads messages of one file; at most MAX_FIELDS fields are read in all. */
export class Reader {
  private left = MAX_FIELDS;
  private at = 0;
  private readonly decoder = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });

  constructor(private readonly data: Uint8Array) {}

  /** Raises WireError. */
  read(table: Table, [first, stop]: Span): Message {
    const message = new Message();
    this.at = first;
    while (this.at < stop) {
      if (--this.left < 0) throw new WireError(`more than ${MAX_FIELDS} fields`);
      const start = this.at;
      const tag = this.varint(stop);
      const field = table.get(tag);
      if (field === undefined) throw new WireError(unknown(table, tag, start));
      const { name, wire, refused } = field;
      if (refused) throw new WireError(`field '${name}' at byte ${start}: ${refused}`);
      const tooLong = (): WireError => new WireError(`field '${name}' at byte ${start} is longer than its message`);
      let value: number | Span;
      if (wire === FIXED32 || wire === FIXED64) {
        const size = wire === FIXED32 ? 4 : 8;
        if (size > stop - this.at) throw tooLong();
        value = this.at;
        this.at += size;
      } else {
        if (this.at >= stop) throw tooLong();
        value = this.varint(stop);
        if (wire === BYTES) {
          if (value > stop - this.at) throw tooLong();
          const begin = this.at;
          this.at += value;
          value = [begin, this.at];
        }
      }
      if (!message.add(field, value)) {
        throw new WireError(`field '${name}' is there twice, again at byte ${start}`);
      }
    }
    return message;
  }

  /** The unsigned number at the present place: at most 64 bits, in no more bytes than it needs. */
  private varint(stop: number): number {
    const first = this.at;
    const end = Math.min(stop, first + 10);
    let value = 0;
    let scale = 1;
    for (let place = first; place < end; place++) {
      const byte = this.data[place] as number;
      value += (byte & 0x7f) * scale;
      if (byte < 0x80) {
        if ((byte === 0 && place > first) || (place === first + 9 && byte > 1)) {
          throw new WireError(`the number at byte ${first} is longer than it has to be, or has more than 64 bits`);
        }
        this.at = place + 1;
        return value;
      }
      scale *= 128;
    }
    throw new WireError(`the number at byte ${first} does not end within 10 bytes, or within its message`);
  }

  /** A string. Raises WireError for what is not UTF-8, or holds the byte 0, where C would see its end. */
  text(span: Span | undefined): string {
    if (span === undefined) return "";
    const raw = this.data.subarray(span[0], span[1]);
    if (raw.includes(0)) throw new WireError(`the text at byte ${span[0]} holds a zero byte`);
    try {
      return this.decoder.decode(raw);
    } catch {
      throw new WireError(`the text at byte ${span[0]} is not UTF-8`);
    }
  }

  /** How many numbers a packed list holds. Raises WireError. */
  countVarints([first, stop]: Span): number {
    let count = 0;
    this.at = first;
    while (this.at < stop) {
      this.varint(stop);
      count++;
    }
    return count;
  }
}

function unknown(table: Table, tag: number, at: number): string {
  const [number, wire] = [Math.floor(tag / 8), tag % 8];
  for (const [known, field] of table) {
    if (Math.floor(known / 8) === number) {
      return `field '${field.name}' at byte ${at} has wire type ${wire}, expected ${field.wire}`;
    }
  }
  return `unknown field number ${number} (wire type ${wire}) at byte ${at}`;
}
