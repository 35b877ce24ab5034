/** What callers get wrong and what browsers take away: one clear error each, and the runtime goes on. */

import "fake-indexeddb/auto";

import { IDBFactory } from "fake-indexeddb";
import { beforeEach, describe, expect, test } from "vitest";

import type { NdArray } from "../src/arrays.js";
import { NoStorageError, RuntimeInputError, RuntimeProgramError, StorageError } from "../src/errors.js";
import { listSlots, load, type LoadOptions, type Runtime } from "../src/index.js";
import { expectArrays, expectClose, fixture } from "./fixture.js";

const given = fixture("mlp");
const factory = Object.getOwnPropertyDescriptor(globalThis, "indexedDB")!;

beforeEach(() => {
  Object.defineProperty(globalThis, "indexedDB", factory);
  globalThis.indexedDB = new IDBFactory();
});

const open = (options: object = {}): Promise<Runtime> =>
  load(given.bundle, { trustedKeys: [given.numbers.publicKey], ...options } as LoadOptions);

describe("options", () => {
  test.each<[object, string]>([
    [{ trustedkeys: [] }, "load: there is no option 'trustedkeys'; did you mean 'trustedKeys'?"],
    [{ slots: "mine" }, "load: there is no option 'slots'; did you mean 'slot'?"],
    [{ colour: "red" }, "load: there is no option 'colour'; the options are trustedKeys, "],
    [{ carry: "some" }, 'carry: expected "all", "personal" or "nothing", got "some"'],
    [{ delegate: "gpu" }, 'delegate: expected "auto", "wasm" or "webgpu", got "gpu"'],
    [{ onProgress: true }, "load: onProgress must be a function, got boolean"],
    [{ signal: {} }, "load: signal must be an AbortSignal"],
  ])("of load: %o", async (options, message) => {
    await expect(open(options)).rejects.toThrow(message);
    await expect(open(options)).rejects.toThrow(RuntimeInputError);
  });

  test("of calls", async () => {
    const rt = await open();
    const x = given.fit.x;
    await expect(rt.fit({ x, epoch: 2 } as never)).rejects.toThrow("fit: there is no option 'epoch'; did you mean 'epochs'?");
    await expect(rt.fit({ x, batch_size: 2 } as never)).rejects.toThrow("did you mean 'batchSize'?");
    await expect(rt.fit(undefined as never)).rejects.toThrow("fit: expected an object of options, got undefined");
    await expect(rt.evaluate({ x, batchsize: 2 } as never)).rejects.toThrow("did you mean 'batchSize'?");
    await expect(rt.localRound({ x, seeds: 1 } as never)).rejects.toThrow("did you mean 'seed'?");
    expectClose((await rt.fit({ ...given.fit })).losses, given.numbers.losses);
  });
});

describe("labels", () => {
  const labelled = (...wrong: number[]): Record<string, NdArray> => {
    const { label, input } = given.fit.x as { label: NdArray; input: NdArray };
    const data = (label.data as BigInt64Array).slice();
    wrong.forEach((value, index) => (data[7 + index] = BigInt(value)));
    return { input, label: { ...label, data } };
  };

  test.each([4, -1, 255])("that are no class are refused: %i", async (wrong) => {
    const rt = await open();
    const message = `'label' of example 7 is ${wrong}, which is no class: they are 0 to 3. Correct it, or give ignoreLabel`;
    const x = labelled(wrong);
    await expect(rt.fit({ x })).rejects.toThrow(`fit: ${message}`);
    await expect(rt.evaluate({ x })).rejects.toThrow(`evaluate: ${message}`);
    await expect(rt.localRound({ x, seed: 1 })).rejects.toThrow(`localRound: ${message}`);
    await expect(rt.fit({ x: given.fit.x, validation: { x } })).rejects.toThrow(`validation: ${message}`);
  });

  test("one may be said to count for nothing", async () => {
    const rt = await open();
    // It is for the bundle's loss then; this one's has no such label.
    await expect(rt.fit({ x: labelled(-1, -1), ignoreLabel: -1 })).rejects.toThrow(RuntimeProgramError);
    await expect(rt.fit({ x: labelled(-1, 4), ignoreLabel: -1 })).rejects.toThrow("of example 8 is 4");
  });
});

describe("without storage", () => {
  const blocked = { get: () => { throw new DOMException("The operation is insecure.", "SecurityError"); } };
  const broken = { value: { open: () => fail(new DOMException("A mutation operation was attempted", "InvalidStateError")) } };

  test.each<[string, PropertyDescriptor, RegExp]>([
    ["missing", { value: undefined }, /IndexedDB is missing here/],
    ["blocked", blocked, /lets the page keep nothing: The operation is insecure/],
    ["of no use", broken, /cannot be opened: A mutation operation was attempted/],
  ])("%s: the model answers and learns, and saving says why not", async (_, property, message) => {
    Object.defineProperty(globalThis, "indexedDB", { ...property, configurable: true });
    const rt = await open({ slot: "mine" });
    expect(rt.storageProblem).toMatch(message);
    expect(rt.restored).toBeNull();
    const input = given.fit.x.input!;
    expectArrays({ output: await rt.predict(input) }, given.group("before"), 1e-4, 1e-5);
    expectClose((await rt.fit({ ...given.fit })).losses, given.numbers.losses);
    await expect(rt.save("mine")).rejects.toThrow(NoStorageError);
    await expect(rt.save("mine")).rejects.toThrow(message);
    await expect(listSlots()).rejects.toThrow(NoStorageError);
    await expect(rt.fit({ ...given.fit, checkpoint: "fit" })).rejects.toThrow(message);
  });

  test("that was cleared, the model is as published, and can be saved again", async () => {
    const rt = await open({ slot: "mine" });
    await rt.fit({ ...given.fit, epochs: 1 });
    await rt.save("mine");
    globalThis.indexedDB = new IDBFactory();
    const again = await open({ slot: "mine" });
    expect([again.restored, again.storageProblem]).toEqual([null, null]);
    expectArrays({ output: await again.predict(given.fit.x.input!) }, given.group("before"), 1e-4, 1e-5);
    await rt.save("mine");
    expect((await open({ slot: "mine" })).restored?.moved).toHaveLength(4);
  });

  test("whose database is another's, the error is the library's", async () => {
    await new Promise((resolve) => {
      indexedDB.open("archipel", 1).onsuccess = resolve;
    });
    const rt = await open();
    await expect(rt.save("mine")).rejects.toThrow(StorageError);
  });
});

describe("callbacks that raise an error", () => {
  test("end a fit with it, and the model is as before", async () => {
    const rt = await open();
    for (const name of ["onStep", "onEpoch"] as const) {
      const calls: number[] = [];
      const failing = (): never => {
        calls.push(1);
        throw new RangeError("the chart is gone");
      };
      await expect(rt.fit({ ...given.fit, [name]: failing })).rejects.toThrow(new RangeError("the chart is gone"));
      expect(calls).toHaveLength(1);
    }
    expectArrays({ output: await rt.predict(given.fit.x.input!) }, given.group("before"), 1e-4, 1e-5);
  });
});

describe("an AbortSignal", () => {
  test("ends a fit as if it had not been", async () => {
    const rt = await open();
    const controller = new AbortController();
    const onStep = ({ step }: { step: number }): void => void (step === 5 && controller.abort(new Error("enough")));
    await expect(rt.fit({ ...given.fit, signal: controller.signal, onStep })).rejects.toThrow("enough");
    expectArrays({ output: await rt.predict(given.fit.x.input!) }, given.group("before"), 1e-4, 1e-5);
    await expect(rt.fit({ ...given.fit, signal: controller.signal })).rejects.toThrow("enough");
    expectClose((await rt.fit({ ...given.fit })).losses, given.numbers.losses);
  });

  test("ends a fit that is held, and loading", async () => {
    const rt = await open();
    rt.pause();
    const signal = AbortSignal.timeout(50);
    await expect(rt.fit({ ...given.fit, signal })).rejects.toThrow(/timeout/);
    rt.resume();
    await expect(open({ signal: AbortSignal.abort() })).rejects.toThrow(/aborted/);
  });
});

/** A request that ends with that error. */
function fail(error: DOMException): object {
  const request = { error, onerror: () => undefined };
  setTimeout(() => request.onerror());
  return request;
}
