/** One's own digits and the losses so far, in IndexedDB: they are there again after a reload, and nowhere else. */

import type { Digit } from "./digits.js";

export interface OwnDigit extends Digit {
  id: number;
}

/** A training that has begun: what is needed to begin it again and go on from the library's checkpoint. */
export interface Training {
  seed: number;
  digits: number[];
  /** Counts the trainings that were given up, whose checkpoints are not to be continued. */
  abandoned: number;
}

const DATABASE = "archipel-demo";
const DIGITS = "digits";
const PROGRESS = "progress";

export class OwnDigits {
  private constructor(private readonly database: IDBDatabase) {}

  static async open(): Promise<OwnDigits> {
    const request = indexedDB.open(DATABASE, 1);
    request.onupgradeneeded = () => {
      request.result.createObjectStore(DIGITS, { keyPath: "id", autoIncrement: true });
      request.result.createObjectStore(PROGRESS);
    };
    return new OwnDigits(await finished(request));
  }

  /** In the order in which they were drawn. */
  async all(): Promise<OwnDigit[]> {
    return finished(this.store(DIGITS, "readonly").getAll() as IDBRequest<OwnDigit[]>);
  }

  async add(digit: Digit): Promise<OwnDigit> {
    const id = await finished(this.store(DIGITS, "readwrite").add({ image: digit.image, label: digit.label }));
    return { ...digit, id: Number(id) };
  }

  async remove(id: number): Promise<void> {
    await finished(this.store(DIGITS, "readwrite").delete(id));
  }

  async clear(): Promise<void> {
    await finished(this.store(DIGITS, "readwrite").clear());
  }

  /** Of every step since the published model. */
  async losses(): Promise<number[]> {
    return (await this.progress<number[]>("losses")) ?? [];
  }

  async keepLosses(losses: readonly number[]): Promise<void> {
    await finished(this.store(PROGRESS, "readwrite").put([...losses], "losses"));
  }

  /** The training that was not finished when the page was closed. */
  async unfinished(): Promise<Training | undefined> {
    return this.progress<Training>("training");
  }

  async begin(training: Training): Promise<void> {
    await finished(this.store(PROGRESS, "readwrite").put(training, "training"));
  }

  async abandoned(): Promise<number> {
    return (await this.progress<number>("abandoned")) ?? 0;
  }

  /** The training that had begun cannot go on from its checkpoint; the next one begins under another name. */
  async abandon(): Promise<void> {
    await finished(this.store(PROGRESS, "readwrite").put((await this.abandoned()) + 1, "abandoned"));
    await this.end();
  }

  async end(): Promise<void> {
    await finished(this.store(PROGRESS, "readwrite").delete("training"));
  }

  private progress<T>(key: string): Promise<T | undefined> {
    return finished(this.store(PROGRESS, "readonly").get(key) as IDBRequest<T | undefined>);
  }

  private store(name: string, mode: IDBTransactionMode): IDBObjectStore {
    return this.database.transaction(name, mode).objectStore(name);
  }
}

function finished<T>(request: IDBRequest<T>): Promise<T> {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error ?? new Error("the browser's storage failed"));
  });
}
