/** The page's side and the worker's, joined by real messages: structured clones and transfers, in one process. */

import { beforeAll, describe, expect, test } from "vitest";

import type { NdArray } from "../src/arrays.js";
import { DigestError, NonFiniteLossError, RuntimeInputError, SignatureError } from "../src/errors.js";
import { load, type LoadOptions, type Runtime } from "../src/index.js";
import { expectArrays, expectClose, fixture } from "./fixture.js";
import { filesOf, pack } from "./forge.js";

interface Scope {
  Worker?: unknown;
  onmessage?: ((event: MessageEvent) => void) | null;
  postMessage?: (message: unknown, transfer?: Transferable[]) => void;
}

const scope = globalThis as Scope;
let started = 0;
let ended = 0;

/** A Worker whose script runs in this process: what crosses the port is what would cross to another thread. */
class PortWorker {
  onmessage: ((event: MessageEvent) => void) | null = null;
  onerror: ((event: ErrorEvent) => void) | null = null;
  private readonly channel = new MessageChannel();

  constructor(readonly url: URL) {
    started++;
    const { port1, port2 } = this.channel;
    port1.onmessage = (event) => this.onmessage?.(event);
    scope.postMessage = (message, transfer = []) => port2.postMessage(message, transfer);
    port2.onmessage = (event) => void script.then(() => scope.onmessage?.(event));
  }

  postMessage(message: unknown): void {
    this.channel.port1.postMessage(message);
  }

  terminate(): void {
    ended++;
    this.channel.port1.close();
  }
}

let script: Promise<unknown>;

beforeAll(() => {
  // ONNX Runtime gives Node a Worker of its own when it is loaded; this one is to stay.
  Object.defineProperty(scope, "Worker", { get: () => PortWorker, set: () => undefined, configurable: true });
  script = import("../src/worker/wasm.js");
});

const given = fixture("cnn");

function open(options: Partial<LoadOptions> = {}): Promise<Runtime> {
  return load(given.bundle, { trustedKeys: [given.numbers.publicKey], worker: true, ...options });
}

test("everything is as without a worker", async () => {
  const rt = await open();
  expect(rt.manifest.name).toBe("cnn");
  expect([rt.delegate, rt.delegateReason]).toEqual(["wasm", "no WebGPU: this browser has none"]);
  const { input } = given.fit.x as { input: NdArray };
  expectArrays(await rt.predict({ input }), given.group("before"), 1e-4, 1e-5);
  const steps: number[] = [];
  const epochs: number[] = [];
  const history = await rt.fit({
    ...given.fit,
    validation: { x: given.fit.x },
    onStep: ({ step }) => void steps.push(step),
    onEpoch: ({ epoch }) => void epochs.push(epoch),
  });
  expectClose(history.losses, given.numbers.losses);
  expect(steps).toHaveLength(50);
  expect(epochs).toEqual([0, 1, 2, 3, 4, 5, 6, 7, 8, 9]);
  expect(history.validation).toHaveLength(10);
  // The caller's arrays are still the caller's.
  expect(input.data.length).toBe(3800);
  expectArrays(await rt.parameters(), given.group("parameter"), 1e-3, 1e-5);
  expectClose(Object.values(await rt.evaluate({ x: given.fit.x })), Object.values(given.numbers.evaluate), 1e-3);
  await rt.reset("parameters");
  const update = await rt.localRound({ x: given.fit.x, ...given.numbers.round });
  expectArrays(update.arrays, given.group("update0"), 1e-3, 1e-5);
  await rt.setParameters(given.group("parameter"));
  expectArrays({ output: await rt.predict(input) }, given.group("after"), 1e-3, 1e-4);
  rt.close();
});

test("a small part of a large array travels alone", async () => {
  const rt = await open();
  const { input } = given.fit.x as { input: NdArray };
  const large = new Float32Array(10_000_000);
  large.set(input.data as Float32Array, 500);
  const part = { ...input, data: large.subarray(500, 500 + input.data.length) };
  expectArrays({ output: await rt.predict(part) }, given.group("before"), 1e-4, 1e-5);
  expect(large.length).toBe(10_000_000);
  rt.close();
});

describe("errors keep their class and text", () => {
  test("of loading", async () => {
    await expect(open({ trustedKeys: ["00".repeat(32)] })).rejects.toThrow(SignatureError);
    const files = filesOf(given.bundle);
    files.set("train.onnx", new Uint8Array(9));
    const tampered = load(pack(files), { trustedKeys: [given.numbers.publicKey], worker: true });
    await expect(tampered).rejects.toThrow(DigestError);
  });

  test("of use", async () => {
    const rt = await open();
    await expect(rt.fit({ ...given.fit, epochs: 0 })).rejects.toThrow(RuntimeInputError);
    const { input } = given.fit.x as { input: NdArray };
    const bad = { ...input, data: new Float32Array(3800).fill(Number.NaN) };
    await expect(rt.fit({ ...given.fit, x: { ...given.fit.x, input: bad } })).rejects.toThrow(NonFiniteLossError);
    await expect(rt.predict({ input: (() => 0) as never })).rejects.toThrow(/cannot be sent to the worker/);
    await expect(rt.save("")).rejects.toThrow(RuntimeInputError);
    rt.close();
  });
});

test("pause, resume and cancel", async () => {
  const rt = await open();
  let steps = 0;
  const running = rt.fit({
    ...given.fit,
    onStep: () => {
      steps++;
      if (steps === 3) rt.pause();
    },
  });
  while (steps < 3) await sleep(2);
  await sleep(80);
  const held = steps;
  await sleep(80);
  expect(steps).toBe(held);
  expect(steps).toBeLessThan(50);
  rt.resume();
  expectClose((await running).losses, given.numbers.losses);
  const stopped = await rt.fit({ ...given.fit, epochs: 100, onStep: ({ step }) => step === 2 });
  expect(stopped.stopped).toBe(true);
  expect(stopped.steps).toBeLessThan(500);
  const cancelled = rt.fit({ ...given.fit, epochs: 100 });
  rt.cancel();
  expect((await cancelled).stopped).toBe(true);
  rt.close();
});

test("a callback that raises an error, and an AbortSignal, end a fit as if it had not been", async () => {
  const rt = await open();
  const { input } = given.fit.x as { input: NdArray };
  const options = { ...given.fit, epochs: 100 };
  let calls = 0;
  const onStep = (): never => {
    calls++;
    throw new RangeError("the chart is gone");
  };
  await expect(rt.fit({ ...options, onStep })).rejects.toThrow(new RangeError("the chart is gone"));
  expect(calls).toBe(1);
  await expect(rt.fit({ ...options, onStep: async () => onStep() })).rejects.toThrow(RangeError);
  const controller = new AbortController();
  const stop = ({ step }: { step: number }): void => void (step === 3 && controller.abort(new Error("enough")));
  await expect(rt.fit({ ...options, signal: controller.signal, onStep: stop })).rejects.toThrow("enough");
  await expect(rt.fit({ ...options, signal: controller.signal })).rejects.toThrow("enough");
  await expect(rt.fit({ ...options, onstep: stop } as never)).rejects.toThrow("did you mean 'onStep'?");
  expectArrays({ output: await rt.predict(input) }, given.group("before"), 1e-4, 1e-5);
  // Others are not ended along with it.
  expectClose((await rt.fit({ ...given.fit })).losses, given.numbers.losses);
  rt.close();
  const early = new AbortController();
  const loading = open({ signal: early.signal });
  setTimeout(() => early.abort(new Error("gone")), 5);
  await expect(loading).rejects.toThrow("gone");
});

test("one worker serves all runtimes, and ends with the last", async () => {
  const [from, to] = [started, ended];
  const [first, second] = await Promise.all([open(), open()]);
  expect(started - from).toBe(1);
  await first.setParameters(given.group("parameter"));
  const { input } = given.fit.x as { input: NdArray };
  expectArrays(await second.predict({ input }), given.group("before"), 1e-4, 1e-5);
  const waiting = first.fit({ ...given.fit, epochs: 100 });
  first.close();
  await expect(waiting).rejects.toThrow(/was closed/);
  await expect(first.parameters()).rejects.toThrow(/closed/);
  expect(ended - to).toBe(0);
  expectArrays(await second.predict({ input }), given.group("before"), 1e-4, 1e-5);
  second.close();
  expect(ended - to).toBe(1);
});

function sleep(milliseconds: number): Promise<void> {
  return new Promise((resolve) => setTimeout(resolve, milliseconds));
}
