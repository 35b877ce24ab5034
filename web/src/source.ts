/** What a caller gives to load from, as bytes. */

import { MAX_ARCHIVE_BYTES } from "./bundle/archive.js";
import { ArchiveError, RuntimeInputError, SignatureError } from "./errors.js";
import { abortable, fetchPatiently } from "./fetching.js";

/** A string or a URL is an address to fetch; a Response is one that the caller has fetched. */
export type Source = ArrayBuffer | Uint8Array | Blob | Response | URL | string;

/** Bytes of the bundle that have come; `total` is null where the server does not say how many there are. */
export interface DownloadProgress {
  readonly loaded: number;
  readonly total: number | null;
}

export interface Watching {
  readonly signal?: AbortSignal | undefined;
  readonly onProgress?: ((progress: DownloadProgress) => unknown) | undefined;
}

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

/** The file's bytes. Raises ArchiveError, RuntimeInputError, the signal's reason, or what `onProgress` raises. */
export async function readSource(source: Source, watching: Watching = {}): Promise<Uint8Array> {
  watching.signal?.throwIfAborted();
  if (source instanceof Uint8Array) return source;
  if (source instanceof ArrayBuffer) return new Uint8Array(source);
  if (source instanceof Blob) {
    if (source.size > MAX_ARCHIVE_BYTES) throw tooLarge(source.size);
    return new Uint8Array(await abortable(source.arrayBuffer(), watching.signal));
  }
  if (source instanceof Response) return readResponse(source, source.url || "the given response", watching);
  if (typeof source !== "string" && !(source instanceof URL)) {
    throw new RuntimeInputError(
      "load: expected an address, a URL, a Response, an ArrayBuffer, a Uint8Array or a Blob as the bundle",
    );
  }
  const { signal } = watching;
  let response: Response;
  try {
    response = await fetchPatiently(source, signal === undefined ? {} : { signal });
  } catch (error) {
    signal?.throwIfAborted();
    throw new ArchiveError(`${source}: cannot be fetched (${wordsOf(error)}); is the device online, the address right?`);
  }
  return readResponse(response, String(source), watching);
}

async function readResponse(response: Response, address: string, watching: Watching): Promise<Uint8Array> {
  const { signal, onProgress } = watching;
  if (!response.ok) throw new ArchiveError(`${address}: the server answers ${response.status} ${response.statusText}`);
  if (response.bodyUsed) throw new RuntimeInputError(`${address}: its body has been read already; give a clone of it`);
  // Of a compressed body the header tells the compressed length.
  const announced = response.headers.has("content-encoding") ? 0 : Number(response.headers.get("content-length") ?? 0);
  if (announced > MAX_ARCHIVE_BYTES) throw tooLarge(announced);
  const parts: Uint8Array[] = [];
  let loaded = 0;
  const reader = response.body?.getReader();
  const read = async (): Promise<Uint8Array | undefined> => {
    try {
      return reader === undefined ? undefined : (await abortable(reader.read(), signal)).value;
    } catch (error) {
      signal?.throwIfAborted();
      throw new ArchiveError(`${address}: broke off after ${loaded} bytes (${wordsOf(error)}); load it again`);
    }
  };
  try {
    for (let part = await read(); part !== undefined; part = await read()) {
      loaded += part.length;
      if (loaded > MAX_ARCHIVE_BYTES) throw tooLarge(loaded);
      parts.push(part);
      onProgress?.({ loaded, total: announced >= loaded ? announced : null });
    }
  } catch (error) {
    await reader?.cancel().catch(() => undefined);
    throw error;
  }
  const file = new Uint8Array(loaded);
  let at = 0;
  for (const part of parts) {
    file.set(part, at);
    at += part.length;
  }
  return file;
}

function wordsOf(error: unknown): string {
  return error instanceof Error ? error.message : String(error);
}

function tooLarge(bytes: number): ArchiveError {
  return new ArchiveError(`bundle: ${bytes} bytes, the limit is ${MAX_ARCHIVE_BYTES}`);
}
