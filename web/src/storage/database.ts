/** IndexedDB as promises, for two stores of records: saved models and checkpoints of fits. */

import { StorageError } from "../errors.js";
import { sha256 } from "../bundle/reader.js";

const NAME = "archipel";
const VERSION = 1;
const STORES = ["slots", "checkpoints"] as const;

export type StoreName = (typeof STORES)[number];

/** Bytes under a key, with the digest that says whether they are whole. */
interface Entry {
  readonly data: Uint8Array<ArrayBuffer>;
  readonly sha256: string;
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

/** Put the bytes under `key`, all at once; on disk when it resolves. Raises StorageError. */
export async function writeEntry(store: StoreName, key: string, data: Uint8Array<ArrayBuffer>): Promise<void> {
  const entry: Entry = { data, sha256: await sha256(data) };
  await transaction(store, "readwrite", (records) => records.put(entry, key));
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
  } finally {
    database.close();
  }
}

function open(): Promise<IDBDatabase> {
  if (globalThis.indexedDB === undefined) {
    return Promise.reject(new StorageError("IndexedDB is missing here, so nothing can be kept"));
  }
  return new Promise((resolve, reject) => {
    const request = indexedDB.open(NAME, VERSION);
    request.onupgradeneeded = () => {
      for (const store of STORES) {
        if (!request.result.objectStoreNames.contains(store)) request.result.createObjectStore(store);
      }
    };
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(failed("database", request.error));
    request.onblocked = () => reject(new StorageError("the database is held open by an older page; close its tabs"));
  });
}

function failed(what: string, error: DOMException | null): StorageError {
  const full = error?.name === "QuotaExceededError" ? "; the browser gives no more space to this site" : "";
  return new StorageError(`${what}: IndexedDB says: ${error?.message ?? "unknown error"}${full}`);
}
