/** What is kept in IndexedDB: saved models, and fits that go on where they were interrupted. */

import "fake-indexeddb/auto";

import { IDBFactory } from "fake-indexeddb";
import { beforeEach, describe, expect, test } from "vitest";

import type { NdArray } from "../src/arrays.js";
import { CheckpointError, NonFiniteLossError, RuntimeInputError, StorageError } from "../src/errors.js";
import type { RuntimeCore } from "../src/runtime/runtime.js";
import { readEntry, writeEntry } from "../src/storage/database.js";
import { examples, expectArrays, expectClose, type Fixture, fixture, type FixtureName } from "./fixture.js";

beforeEach(() => {
  globalThis.indexedDB = new IDBFactory();
});

/** The page is gone in the middle of a fit: what happens to its promise, nobody hears. */
class Gone extends Error {}

describe.each<FixtureName>(["cnn", "mlp", "norm", "personal", "features"])("%s", (name) => {
  test("a model is saved and comes back", async () => {
    const given = fixture(name);
    const rt = await given.load({ slot: "mine" });
    await rt.fit({ ...given.fit, epochs: 1 });
    await rt.save("mine");
    const again = await given.load({ slot: "mine" });
    expectArrays(await again.parameters(), await rt.parameters(), 0, 0);
    const x = examples(rt, given.fit.x);
    expectArrays(await again.predict(x), await rt.predict(x), 0, 0);
    // Personal tensors and device state are part of it: both go on in the same way.
    const more = { ...given.fit, epochs: 1, seed: 77 };
    expect((await again.fit(more)).losses).toEqual((await rt.fit(more)).losses);
    expectArrays(await (await given.load({ slot: "another" })).predict(x), given.group("before"), 1e-4, 1e-5);
  });

  test("a fit that was interrupted twice has the result of one that was not", async () => {
    const given = fixture(name);
    const whole = await given.load();
    const expected = await whole.fit({ ...given.fit });
    const options = { ...given.fit, checkpoint: "fit", checkpointEvery: 0 };
    for (const last of [17, 31]) {
      const rt = await given.load();
      await expect(rt.fit({ ...options, onStep: ({ step }) => dieAt(step, last) })).rejects.toThrow(Gone);
    }
    const rt = await given.load();
    const seen: number[] = [];
    const history = await rt.fit({ ...options, onStep: ({ step }) => void seen.push(step) });
    expect(history).toEqual(expected);
    expectClose(history.losses, given.numbers.losses);
    // A graph of several steps may have to make its last few again.
    expect(seen[0]).toBeGreaterThanOrEqual(28);
    expectArrays(await rt.parameters(), await whole.parameters(), 0, 0);
    const x = examples(rt, given.fit.x);
    expectArrays(await rt.predict(x), await whole.predict(x), 0, 0);
  });
});

describe("checkpoints", () => {
  let given: Fixture;
  let rt: RuntimeCore;

  beforeEach(async () => {
    given = fixture("mlp");
    rt = await given.load();
  });

  const options = (more: object = {}): Parameters<RuntimeCore["fit"]>[0] => ({
    ...given.fit,
    checkpoint: "fit",
    checkpointEvery: 0,
    ...more,
  });

  test("a fit that is complete is not made again", async () => {
    const history = await rt.fit(options({ validation: { x: given.fit.x } }));
    const again = await given.load();
    const seen: number[] = [];
    const same = await again.fit(
      options({ validation: { x: given.fit.x }, onStep: ({ step }: { step: number }) => void seen.push(step) }),
    );
    expect(seen).toEqual([]);
    expect(same).toEqual(history);
    expectArrays(await again.parameters(), await rt.parameters(), 0, 0);
    // From the parameters that it ended with it is another fit, and takes the place of the complete one.
    expect((await again.fit(options())).losses).not.toEqual(history.losses);
  });

  test("of a fit with other inputs: refused while it is not complete", async () => {
    await expect(rt.fit(options({ onStep: ({ step }: { step: number }) => dieAt(step, 20) }))).rejects.toThrow(Gone);
    const { label } = given.fit.x as { label: NdArray };
    const others: object[] = [
      { seed: 1 },
      { batchSize: 10 },
      { epochs: 6 },
      { shuffle: false },
      { hyperparameters: { lr: 0.01 } },
      { moves: ["0.bias"] },
      { x: { ...given.fit.x, label: { ...label, data: label.data.slice().reverse() } } },
    ];
    for (const other of others) {
      await expect((await given.load()).fit(options(other))).rejects.toThrow(/another fit that is not complete/);
    }
    const moved = await given.load();
    await moved.setParameters(given.group("parameter"));
    await expect(moved.fit(options())).rejects.toThrow(CheckpointError);
    // Under another name it is made.
    expect((await moved.fit(options({ checkpoint: "other" }))).steps).toBe(50);
    expectClose((await (await given.load()).fit(options())).losses, given.numbers.losses);
  });

  test("pausing writes one at once", async () => {
    const running = rt.fit(
      options({ checkpointEvery: 1e6, onStep: ({ step }: { step: number }) => void (step === 7 && rt.pause()) }),
    );
    while ((await readEntry("checkpoints", "fit")) === null) await new Promise((resolve) => setTimeout(resolve, 5));
    rt.resume();
    expectClose((await running).losses, given.numbers.losses);
  });

  test("without time to write one there is only the last", async () => {
    const during: unknown[] = [];
    const onEpoch = async (): Promise<void> => void during.push(await readEntry("checkpoints", "fit"));
    await rt.fit(options({ checkpointEvery: 1e6, onEpoch }));
    expect(during).toEqual([null, null, null, null, null]);
    expect(await readEntry("checkpoints", "fit")).not.toBeNull();
  });

  test("a fit that diverges leaves none", async () => {
    const { input } = given.fit.x as { input: NdArray };
    const bad = { ...input, data: (input.data as Float32Array).slice() };
    bad.data[300] = Number.NaN;
    const x = { ...given.fit.x, input: bad };
    await expect(rt.fit(options({ x }))).rejects.toThrow(NonFiniteLossError);
    expect(await readEntry("checkpoints", "fit")).toBeNull();
  });

  test("what is damaged is refused, whatever bytes they are", async () => {
    await expect(rt.fit(options({ onStep: ({ step }: { step: number }) => dieAt(step, 9) }))).rejects.toThrow(Gone);
    const sound = (await readEntry("checkpoints", "fit")) as Uint8Array;
    let refused = 0;
    for (let round = 0; round < 40; round++) {
      const data = new Uint8Array(sound);
      const at = (round * 97) % 1600;
      data[at] = (data[at] as number) ^ (1 << (round % 8));
      await writeEntry("checkpoints", "fit", data);
      const outcome = await (await given.load()).fit(options({ epochs: 5 })).catch((error: unknown) => error);
      if (outcome instanceof Error) {
        expect([round, outcome]).toEqual([round, expect.any(CheckpointError)]);
        refused++;
      }
    }
    expect(refused).toBeGreaterThan(20);
    for (const data of [new Uint8Array(), new Uint8Array(8), Uint8Array.from({ length: 100 }, (_, index) => index)]) {
      await writeEntry("checkpoints", "fit", data);
      await expect((await given.load()).fit(options())).rejects.toThrow(CheckpointError);
    }
  });
});

describe("the database", () => {
  test("bytes that changed where they lie are not believed", async () => {
    const given = fixture("mlp");
    const rt = await given.load();
    await rt.fit({ ...given.fit, epochs: 1 });
    await rt.save("mine");
    await damage("slots", `${rt.digest}/mine`);
    await expect(given.load({ slot: "mine" })).rejects.toThrow(StorageError);
  });

  test("a slot needs a name, and belongs to one bundle", async () => {
    const given = fixture("mlp");
    const rt = await given.load();
    await expect(rt.save("")).rejects.toThrow(RuntimeInputError);
    await rt.setParameters(given.group("parameter"));
    await rt.save("mine");
    expect(await readEntry("slots", `${rt.digest}/mine`)).not.toBeNull();
    const other = fixture("cnn");
    const cnn = await other.load({ slot: "mine" });
    expectArrays(await cnn.predict(examples(cnn, other.fit.x)), other.group("before"), 1e-4, 1e-5);
  });

  test("only what differs from the bundle is kept", async () => {
    const given = fixture("mlp");
    const rt = await given.load();
    await rt.fit({ ...given.fit, moves: ["2.bias"] });
    await rt.save("mine");
    const kept = (await readEntry("slots", `${rt.digest}/mine`)) as Uint8Array;
    expect(kept.length).toBeLessThan(200);
  });

  test("where there is none the error says so", async () => {
    const given = fixture("mlp");
    const rt = await given.load();
    (globalThis as { indexedDB?: IDBFactory }).indexedDB = undefined as never;
    await expect(rt.save("mine")).rejects.toThrow(/IndexedDB is missing/);
  });
});

function dieAt(step: number, last: number): void {
  if (step === last) throw new Gone();
}

async function damage(store: string, key: string): Promise<void> {
  const database = await new Promise<IDBDatabase>((resolve) => {
    const request = indexedDB.open("archipel", 1);
    request.onsuccess = () => resolve(request.result);
  });
  await new Promise<void>((resolve) => {
    const transaction = database.transaction(store, "readwrite");
    const records = transaction.objectStore(store);
    const request = records.get(key);
    request.onsuccess = () => {
      request.result.data[100] ^= 1;
      records.put(request.result, key);
    };
    transaction.oncomplete = () => resolve();
  });
  database.close();
}
