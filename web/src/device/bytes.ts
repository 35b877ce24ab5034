/** Bytes: joined, compared, and as text. */

export type Bytes = Uint8Array<ArrayBuffer>;

const encoder = new TextEncoder();

export function utf8(text: string): Bytes {
  return encoder.encode(text);
}

/** "archipel/v1/LABEL" and a zero byte; version 2 is of rounds over neighbours. */
export function label(name: string, version: 1 | 2 = 1): Bytes {
  return utf8(`archipel/v${version}/${name}\0`);
}

export function concat(...parts: readonly Uint8Array[]): Bytes {
  const joined = new Uint8Array(parts.reduce((size, part) => size + part.length, 0));
  let at = 0;
  for (const part of parts) {
    joined.set(part, at);
    at += part.length;
  }
  return joined;
}

/** Bytes of hexadecimal digits, two for each; the caller has checked that they are such. */
export function unhex(digits: string): Bytes {
  return Uint8Array.from(digits.match(/../g) ?? [], (pair) => Number.parseInt(pair, 16));
}

export function sameBytes(one: Uint8Array, other: Uint8Array): boolean {
  return one.length === other.length && one.every((byte, index) => byte === other[index]);
}

/** Below, at or above 0 as `one` sorts before, with or after `other`, byte by byte. */
export function compareBytes(one: Uint8Array, other: Uint8Array): number {
  for (let index = 0; index < Math.min(one.length, other.length); index++) {
    const difference = (one[index] as number) - (other[index] as number);
    if (difference) return difference;
  }
  return one.length - other.length;
}

/** 32-bit big-endian. */
export function uint32Bytes(number: number): Bytes {
  const bytes = new Uint8Array(4);
  new DataView(bytes.buffer).setUint32(0, number);
  return bytes;
}

/** Standard base64 with padding (RFC 4648, section 4). */
export function base64(bytes: Uint8Array): string {
  let text = "";
  // In parts: a call takes so many arguments only.
  for (let at = 0; at < bytes.length; at += 0x8000) text += String.fromCharCode(...bytes.subarray(at, at + 0x8000));
  return btoa(text);
}

const BASE64 = /^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$/;

/** The bytes, or null where the text is no base64. */
export function unbase64(text: string): Bytes | null {
  if (!BASE64.test(text)) return null;
  return Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
}
