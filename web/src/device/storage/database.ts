/** A device's database: one IndexedDB, whose changes are written all at once or not at all. */

import { NoStorageError, StorageError } from "../../errors.js";

const VERSION = 1;
/**
 * own      keys, the enrolment, the owner's pause
 * rounds   the journal's entries, by round id
 * sealed   masked updates, new and present state of models
 * books    what the device must not forget: plans, revocations, sequences, logs of weights, sums of old rounds
 * files    bundles and weights by digest
 */
const STORES = ["own", "rounds", "sealed", "books", "files"] as const;

export type StoreName = (typeof STORES)[number];

/** `value` undefined: remove what is there. */
export interface Change {
  readonly store: StoreName;
  readonly key: string;
  readonly value?: unknown;
}

/** Every method raises StorageError where the browser's storage fails. */
export class DeviceDatabase {
  private constructor(
    private readonly database: IDBDatabase,
    private readonly name: string,
  ) {
    // Another page of this site erases the device: it must not wait for this one.
    database.onversionchange = () => database.close();
  }

  /** Raises NoStorageError where the browser lets the page keep nothing. */
  static async open(name: string): Promise<DeviceDatabase> {
    const factory = factoryHere();
    const database = await new Promise<IDBDatabase>((resolve, reject) => {
      const request = factory.open(name, VERSION);
      request.onupgradeneeded = () => {
        for (const store of STORES) request.result.createObjectStore(store);
      };
      request.onsuccess = () => resolve(request.result);
      request.onerror = () => reject(new NoStorageError(`IndexedDB cannot be opened: ${wordsOf(request.error)}`));
      request.onblocked = () => reject(new StorageError("the database is held open by an older page; close its tabs"));
    });
    return new DeviceDatabase(database, name);
  }

  async get<T>(store: StoreName, key: string): Promise<T | undefined> {
    return this.read(store, (records) => records.get(key) as IDBRequest<T | undefined>);
  }

  async all<T>(store: StoreName): Promise<T[]> {
    return this.read(store, (records) => records.getAll() as IDBRequest<T[]>);
  }

  async keys(store: StoreName): Promise<string[]> {
    return (await this.read(store, (records) => records.getAllKeys())).map(String);
  }

  /** All changes in one transaction; on disk when it resolves. */
  async write(...changes: readonly Change[]): Promise<void> {
    await this.transaction(
      [...new Set(changes.map((change) => change.store))],
      "readwrite",
      (running) => {
        for (const { store, key, value } of changes) {
          const records = running.objectStore(store);
          if (value === undefined) records.delete(key);
          else records.put(value, key);
        }
      },
    );
  }

  close(): void {
    this.database.close();
  }

  /** Remove everything; nothing can be called afterwards. */
  async erase(): Promise<void> {
    this.close();
    await new Promise<void>((resolve, reject) => {
      const request = factoryHere().deleteDatabase(this.name);
      request.onsuccess = () => resolve();
      request.onerror = () => reject(new StorageError(`the database cannot be removed: ${wordsOf(request.error)}`));
      // It is removed when the pages that hold it have closed it, which `onversionchange` has them do.
    });
  }

  private async read<T>(store: StoreName, ask: (records: IDBObjectStore) => IDBRequest<T>): Promise<T> {
    let request: IDBRequest<T> | undefined;
    await this.transaction([store], "readonly", (running) => {
      request = ask(running.objectStore(store));
    });
    return (request as IDBRequest<T>).result;
  }

  private async transaction(
    stores: readonly StoreName[],
    mode: IDBTransactionMode,
    work: (running: IDBTransaction) => void,
  ): Promise<void> {
    try {
      await new Promise<void>((resolve, reject) => {
        // "strict": the browser reports success when the disk has it, not when the system has.
        const running = this.database.transaction(stores, mode, { durability: "strict" });
        running.oncomplete = () => resolve();
        running.onabort = () => reject(running.error ?? new DOMException("the transaction was aborted"));
        work(running);
      });
    } catch (error) {
      if (!(error instanceof DOMException)) throw error;
      const full = error.name === "QuotaExceededError" ? "; the browser gives no more space to this site" : "";
      throw new StorageError(`device: IndexedDB says: ${wordsOf(error)}${full}`);
    }
  }
}

/** Browsers that block a site's storage leave IndexedDB out, or raise an error where it is looked at. */
function factoryHere(): IDBFactory {
  let factory: IDBFactory | undefined;
  try {
    factory = globalThis.indexedDB;
  } catch (error) {
    throw new NoStorageError(`this browser lets the page keep nothing: ${wordsOf(error)}`);
  }
  if (factory == null) throw new NoStorageError("IndexedDB is missing here, so this cannot be a device");
  return factory;
}

function wordsOf(error: unknown): string {
  return (error as Error | null)?.message || "unknown error";
}
