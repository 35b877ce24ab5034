/**
 * A `.bundle` file: an uncompressed zip, exactly as the converter writes it.
 *
 * Members lie one after the other from byte 0, the central directory follows, then its end record; nothing before,
 * between or after. What a member's own header says is what the directory says. Anything else is refused: a reader
 * that allows more is one that another reader may disagree with about what the file holds.
 * Format: PKWARE APPNOTE 6.3.10, sections 4.3.7 (local header), 4.3.12 (directory), 4.3.16 (end record).
 */

import { ArchiveError, UnsafePathError } from "../errors.js";
import { MAX_MANIFEST_BYTES } from "./manifest.js";
import { checkFileName, MANIFEST_FILE, MAX_TENSOR_BYTES, SIGNATURE_FILE } from "./validation.js";

export const MAX_MEMBERS = 64;
/** Zip without its 64-bit extension ends here; the converter's files of that size are for devices, not for browsers. */
export const MAX_ARCHIVE_BYTES = 2 ** 32 - 1;

const LOCAL = 0x04034b50;
const CENTRAL = 0x02014b50;
const END = 0x06054b50;
const LOCAL_BYTES = 30;
const CENTRAL_BYTES = 46;
const END_BYTES = 22;
const STORED = 0;

interface Entry {
  readonly name: string;
  readonly crc: number;
  readonly bytes: number;
  readonly offset: number;
  /** The fields that both headers have, as written: versions, flags, method, time, checksum, sizes, name length. */
  readonly shared: Uint8Array;
}

/** The members by name, in the file's order: views into `file`, not copies. Raises ArchiveError or UnsafePathError. */
export function unpack(file: Uint8Array): Map<string, Uint8Array> {
  if (file.length > MAX_ARCHIVE_BYTES) {
    throw new ArchiveError(`bundle: ${file.length} bytes, the limit is ${MAX_ARCHIVE_BYTES}`);
  }
  const view = new DataView(file.buffer, file.byteOffset, file.byteLength);
  const { count, start, end } = endRecord(view);
  const entries = directory(file, view, count, start, end);
  checkEntries(entries);
  const members = new Map<string, Uint8Array>();
  let at = 0;
  for (const entry of entries) {
    if (entry.offset !== at) {
      throw new ArchiveError(
        `bundle: member ${entry.name} starts at byte ${entry.offset}, expected ${at}: members overlap or leave gaps`,
      );
    }
    const data = member(file, view, entry, start);
    if (crc32(data) !== entry.crc) throw new ArchiveError(`bundle: member ${entry.name} differs from its checksum`);
    members.set(entry.name, data);
    at = data.byteOffset - file.byteOffset + data.length;
  }
  if (at !== start) throw new ArchiveError(`bundle: ${start - at} bytes between the last member and the directory`);
  return members;
}

function endRecord(view: DataView): { count: number; start: number; end: number } {
  const end = view.byteLength - END_BYTES;
  if (end < 0 || view.getUint32(end, true) !== END) {
    throw new ArchiveError("bundle: no zip directory at the end; expected a .bundle made by archipel");
  }
  const u16 = (offset: number): number => view.getUint16(end + offset, true);
  const count = u16(10);
  const bytes = view.getUint32(end + 12, true);
  const start = view.getUint32(end + 16, true);
  if (u16(4) !== 0 || u16(6) !== 0 || u16(8) !== count || u16(20) !== 0) {
    throw new ArchiveError("bundle: its zip directory is split over disks, or has a comment");
  }
  if (count < 2 || count > MAX_MEMBERS) {
    throw new ArchiveError(`bundle: ${count} members, expected 2 to ${MAX_MEMBERS}`);
  }
  if (start + bytes !== end) {
    throw new ArchiveError(`bundle: its zip directory ends at byte ${start + bytes}, expected ${end}`);
  }
  return { count, start, end };
}

function directory(file: Uint8Array, view: DataView, count: number, start: number, end: number): Entry[] {
  const entries: Entry[] = [];
  let at = start;
  for (let index = 0; index < count; index++) {
    if (at + CENTRAL_BYTES > end || view.getUint32(at, true) !== CENTRAL) {
      throw new ArchiveError(`bundle: entry ${index} of the zip directory is not one`);
    }
    const nameBytes = view.getUint16(at + 28, true);
    const next = at + CENTRAL_BYTES + nameBytes;
    if (next > end) throw new ArchiveError(`bundle: entry ${index} of the zip directory is cut short`);
    const name = latin1(file.subarray(at + CENTRAL_BYTES, next));
    checkName(name);
    const [flags, method] = [view.getUint16(at + 8, true), view.getUint16(at + 10, true)];
    if (flags & 0x1) throw new ArchiveError(`bundle: member ${name} is encrypted`);
    if (method !== STORED || view.getUint32(at + 20, true) !== view.getUint32(at + 24, true)) {
      throw new ArchiveError(`bundle: member ${name} is compressed; a bundle is stored uncompressed`);
    }
    // Extra field, comment, disk number: the converter writes none.
    if (flags !== 0 || view.getUint32(at + 30, true) !== 0 || view.getUint16(at + 34, true) !== 0) {
      throw new ArchiveError(`bundle: member ${name} has flags, an extra field or a comment, which no bundle has`);
    }
    entries.push({
      name,
      crc: view.getUint32(at + 16, true),
      bytes: view.getUint32(at + 24, true),
      offset: view.getUint32(at + 42, true),
      shared: file.subarray(at + 6, at + 30),
    });
    at = next;
  }
  if (at !== end) throw new ArchiveError(`bundle: ${end - at} bytes follow the zip directory`);
  return entries;
}

function checkEntries(entries: readonly Entry[]): void {
  const names = entries.map((entry) => entry.name);
  if (new Set(names).size !== names.length) throw new ArchiveError("bundle: a member is there twice");
  if (names[0] !== MANIFEST_FILE || names[1] !== SIGNATURE_FILE) {
    throw new ArchiveError(
      `bundle: expected ${MANIFEST_FILE} and ${SIGNATURE_FILE} first, got ${names.slice(0, 2).join(", ")}`,
    );
  }
  for (const { name, bytes } of entries) {
    const limit = name === MANIFEST_FILE ? MAX_MANIFEST_BYTES : 2 * MAX_TENSOR_BYTES;
    if (bytes > limit) throw new ArchiveError(`bundle: member ${name} has ${bytes} bytes, the limit is ${limit}`);
  }
}

function member(file: Uint8Array, view: DataView, entry: Entry, limit: number): Uint8Array {
  const { name, bytes, offset, shared } = entry;
  const first = offset + LOCAL_BYTES + name.length;
  if (first + bytes > limit) throw new ArchiveError(`bundle: member ${name} is longer than the file`);
  const same =
    view.getUint32(offset, true) === LOCAL &&
    shared.every((byte, index) => byte === file[offset + 4 + index]) &&
    view.getUint16(offset + 28, true) === 0 &&
    latin1(file.subarray(offset + LOCAL_BYTES, first)) === name;
  if (!same) throw new ArchiveError(`bundle: member ${name} has a header that differs from the zip directory`);
  return file.subarray(first, first + bytes);
}

function checkName(name: string): void {
  try {
    checkFileName(name);
  } catch (error) {
    if (error instanceof UnsafePathError) throw new UnsafePathError(`bundle file: ${error.message}`);
    throw error;
  }
}

function latin1(bytes: Uint8Array): string {
  return String.fromCharCode(...bytes.subarray(0, 256));
}

const TABLE = Uint32Array.from({ length: 256 }, (_, index) => {
  let word = index;
  for (let bit = 0; bit < 8; bit++) word = word & 1 ? 0xedb88320 ^ (word >>> 1) : word >>> 1;
  return word;
});

/** CRC-32 of ISO 3309, as zip has it. */
export function crc32(data: Uint8Array): number {
  let word = 0xffffffff;
  for (let index = 0; index < data.length; index++) {
    word = (TABLE[(word ^ (data[index] as number)) & 0xff] as number) ^ (word >>> 8);
  }
  return (word ^ 0xffffffff) >>> 0;
}
