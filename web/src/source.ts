/** What a caller gives to load from, as bytes. */

import { MAX_ARCHIVE_BYTES } from "./bundle/archive.js";
import { ArchiveError, RuntimeInputError, SignatureError } from "./errors.js";
import { fetchPatiently } from "./fetching.js";

export type Source = ArrayBuffer | Uint8Array | Blob | string;

/** The keys as bytes. Raises SignatureError for one that is not an Ed25519 public key. */
export function keyBytes(keys: readonly (Uint8Array | string)[]): Uint8Array[] {
  if (!Array.isArray(keys)) throw new SignatureError("trustedKeys: expected an array of Ed25519 public keys");
  return keys.map((key) => {
    if (key instanceof Uint8Array && key.length === 32) return key.slice();
    if (typeof key === "string" && /^[0-9a-fA-F]{64}$/.test(key)) {
      return Uint8Array.from(key.match(/../g) ?? [], (pair) => Number.parseInt(pair, 16));
    }
    throw new SignatureError("trustedKeys: expected 32 bytes or 64 hexadecimal digits for each key");
  });
}

/** The file's bytes; a string is an address to fetch. Raises ArchiveError, RuntimeInputError. */
export async function readSource(source: Source): Promise<Uint8Array> {
  if (source instanceof Uint8Array) return source;
  if (source instanceof ArrayBuffer) return new Uint8Array(source);
  if (source instanceof Blob) {
    if (source.size > MAX_ARCHIVE_BYTES) throw tooLarge(source.size);
    return new Uint8Array(await source.arrayBuffer());
  }
  if (typeof source === "string") return download(source);
  throw new RuntimeInputError("load: expected an ArrayBuffer, a Uint8Array, a Blob or an address as the bundle");
}

async function download(address: string): Promise<Uint8Array> {
  const response = await fetchPatiently(address);
  if (!response.ok) throw new ArchiveError(`${address}: the server answers ${response.status} ${response.statusText}`);
  const announced = Number(response.headers.get("content-length") ?? 0);
  if (announced > MAX_ARCHIVE_BYTES) throw tooLarge(announced);
  const parts: Uint8Array[] = [];
  let length = 0;
  const reader = response.body?.getReader();
  for (;;) {
    const part = await reader?.read();
    if (part?.value === undefined) break;
    length += part.value.length;
    if (length > MAX_ARCHIVE_BYTES) {
      await reader?.cancel();
      throw tooLarge(length);
    }
    parts.push(part.value);
  }
  const file = new Uint8Array(length);
  let at = 0;
  for (const part of parts) {
    file.set(part, at);
    at += part.length;
  }
  return file;
}

function tooLarge(bytes: number): ArchiveError {
  return new ArchiveError(`bundle: ${bytes} bytes, the limit is ${MAX_ARCHIVE_BYTES}`);
}
