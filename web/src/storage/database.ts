/** IndexedDB as promises, for two stores of records: saved models and checkpoints of fits. */

import { sha256 } from "../bundle/digests.js";
import { NoStorageError, StorageError } from "../errors.js";

const NAME = "archipel";
const VERSION = 1;
const STORES = ["slots", "checkpoints"] as const;

export type StoreName = (typeof STORES)[number];

/** Bytes under a key, with the digest that says whether they are whole, and what the writer says about them. */
interface Entry {
  readonly data: Uint8Array<ArrayBuffer>;
  readonly sha256: string;
  readonly about?: unknown;
}

/** An entry without its bytes. */
export interface Label {
  readonly key: string;
  readonly bytes: number;
  readonly about: unknown;
}

/** The bytes under `key`, null if there are none. Raises StorageError, also for bytes that are damaged. */
export async function readEntry(store: StoreName, key: string): Promise<Uint8Array | null> {
  const entry = await transaction<Entry | undefined>(store, "readonly", (records) => records.get(key));
  if (entry === undefined) return null;
  if (!(entry.data instanceof Uint8Array) || (await sha256(entry.data)) !== entry.sha256) {
    throw new StorageError(`${store}: what is kept as ${key} is damaged; remove it`);
  }
  return entry.data;
}

/** What there is, by key. Raises StorageError. */
export async function listEntries(store: StoreName): Promise<Label[]> {
  const labels: Label[] = [];
  await transaction(store, "readonly", (records) => {
    const request = records.openCursor();
    request.onsuccess = () => {
      const cursor = request.result;
      if (cursor === null) return;
      const { data, about } = (cursor.value ?? {}) as Partial<Entry>;
      labels.push({ key: String(cursor.key), bytes: data instanceof Uint8Array ? data.length : 0, about });
      cursor.continue();
    };
    return request;
  });
  return labels;
}

/**
 * Put the bytes under `key` and remove the entries `instead`, all at once; on disk when it resolves. Raises StorageError.
 */
export async function writeEntry(
  store: StoreName,
  key: string,
  data: Uint8Array<ArrayBuffer>,
  about?: object,
  instead: readonly string[] = [],
): Promise<void> {
  const entry: Entry = { data, sha256: await sha256(data), ...(about === undefined ? {} : { about }) };
  await transaction(store, "readwrite", (records) => {
    for (const other of instead) records.delete(other);
    return records.put(entry, key);
  });
}

export async function removeEntry(store: StoreName, key: string): Promise<void> {
  await transaction(store, "readwrite", (records) => records.delete(key));
}

async function transaction<T>(
  store: StoreName,
  mode: IDBTransactionMode,
  work: (records: IDBObjectStore) => IDBRequest,
): Promise<T> {
  const database = await open();
  try {
    return await new Promise<T>((resolve, reject) => {
      // "strict": the browser reports success when the disk has it, not when the system has.
      const running = database.transaction(store, mode, { durability: "strict" });
      const request = work(running.objectStore(store));
      running.oncomplete = () => resolve(request.result as T);
      running.onabort = () => reject(failed(store, running.error ?? request.error));
    });
  } catch (error) {
    // A database without the store, or one that the browser closes because its storage is being cleared.
    throw error instanceof DOMException ? failed(store, error) : error;
  } finally {
    database.close();
  }
}

async function open(): Promise<IDBDatabase> {
  const factory = findFactory();
  return new Promise((resolve, reject) => {
    const request = factory.open(NAME, VERSION);
    request.onupgradeneeded = () => {
      for (const store of STORES) {
        if (!request.result.objectStoreNames.contains(store)) request.result.createObjectStore(store);
      }
    };
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(new NoStorageError(`IndexedDB cannot be opened: ${wordsOf(request.error)}`));
    request.onblocked = () => reject(new StorageError("the database is held open by an older page; close its tabs"));
  });
}

/** Browsers that block a site's storage leave IndexedDB out, or raise an error where it is looked at. */
function findFactory(): IDBFactory {
  let factory: IDBFactory | undefined;
  try {
    factory = globalThis.indexedDB;
  } catch (error) {
    throw new NoStorageError(`this browser lets the page keep nothing: ${wordsOf(error)}`);
  }
  if (factory == null) throw new NoStorageError("IndexedDB is missing here, so nothing can be kept");
  return factory;
}

function failed(what: string, error: DOMException | null): StorageError {
  const full = error?.name === "QuotaExceededError" ? "; the browser gives no more space to this site" : "";
  return new StorageError(`${what}: IndexedDB says: ${wordsOf(error)}${full}`);
}

function wordsOf(error: unknown): string {
  return (error as Error | null)?.message || "unknown error";
}
