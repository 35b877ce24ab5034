/**
 * A page as a device of a federation: it enrols, trains in secure rounds on the page's examples, and keeps a journal.
 */

import type { NdArray } from "../arrays.js";
import type { DeviceReport } from "./agent.js";
import type { DeviceSettings } from "./config.js";
import type { Examples } from "./device.js";
import { ClientError, errorOf } from "./errors.js";
import type { DeviceEvent, Outcome } from "./events.js";
import { type Ask, type AskPage, Calls, failure, type FromWorker, type ToWorker } from "./worker/messages.js";

export type { NdArray } from "../arrays.js";
export type { DeviceReport } from "./agent.js";
export type { DeviceSettings } from "./config.js";
export type { Examples } from "./device.js";
export * from "./errors.js";
export type { Detail, DeviceEvent, EventName, Outcome } from "./events.js";
export type { Entry, Totals } from "./storage/entry.js";

export interface DeviceOptions extends DeviceSettings {
  /** The local data, `{ field: array }`. It is asked for when a round needs it, and never leaves this device. */
  readonly examples: () => Examples | Promise<Examples>;
  /** Called for everything that happens. */
  readonly onEvent?: ((event: DeviceEvent) => unknown) | undefined;
  /**
   * Whether the device may work now: true or "" for yes, false or a reason for no. It is asked before work, between
   * training steps and between messages. Default: the device may always work.
   */
  readonly mayWork?: (() => boolean | string | Promise<boolean | string>) | undefined;
  /** Where another tab of this browser is the device: wait until that tab is closed. Default: reject. */
  readonly wait?: boolean | undefined;
}

/**
 * Open the device of this browser profile, in a worker of its own.
 *
 * Rejects with OtherTabError where another tab is the device, ClientError for settings that are none, NoStorageError or
 * StorageError where the browser keeps nothing.
 */
export async function openDevice(options: DeviceOptions): Promise<Device> {
  const { examples, onEvent, mayWork, wait = false, ...settings } = options;
  if (typeof examples !== "function") throw new ClientError("examples: expected a function that gives the local data");
  const device = new Device({ examples, onEvent, mayWork });
  try {
    await device.open(settings, wait);
  } catch (error) {
    device.end();
    throw error;
  }
  return device;
}

type Callbacks = Pick<DeviceOptions, "examples" | "onEvent" | "mayWork">;

/** The page's side: every call is a message to the worker. */
export class Device {
  private readonly worker: Worker;
  private readonly calls = new Calls();

  /** Use `openDevice`. */
  constructor(private readonly callbacks: Callbacks) {
    // Bundlers look for these very words.
    this.worker = new Worker(new URL("./worker/device_worker.js", import.meta.url), {
      type: "module",
      name: "archipel-device",
    });
    this.worker.onmessage = ({ data }: MessageEvent<FromWorker>) => void this.receive(data);
    this.worker.onerror = (event) => {
      this.calls.failAll(new ClientError(`the worker stopped: ${event.message || "its script cannot be loaded"}`));
    };
  }

  /** Part of `openDevice`. */
  async open(settings: DeviceSettings, wait: boolean): Promise<void> {
    await this.call({ method: "open", settings, wait, conditions: this.callbacks.mayWork !== undefined });
  }

  /** 32 hexadecimal digits; empty before enrolment. */
  deviceId(): Promise<string> {
    return this.call({ method: "deviceId" });
  }

  /**
   * Join the population of an enrolment token (the text of its file), and pin the keys in it; gives the device's id.
   *
   * Rejects with MessageError or CertificateError (no token, or one that contradicts itself), OwnerRefusalError,
   * RefusedError (expired, or used by another device), UnreachableError or ClientError (enrolled elsewhere).
   */
  enrol(token: string): Promise<string> {
    return this.call({ method: "enrol", token });
  }

  /**
   * Check in once, and take part in a round if there is one. Rejects with ClientError, UnreachableError, RefusedError.
   */
  runOnce(): Promise<Outcome> {
    return this.call({ method: "runOnce" });
  }

  /** Check in and take part in rounds until `stop` or `close`. Rejects where the server does not know this device. */
  runForever(): Promise<void> {
    return this.call({ method: "runForever" });
  }

  /** The number of the version that this device runs, by model; versions come with the setting `adopt`. */
  models(): Promise<Readonly<Record<string, number>>> {
    return this.call({ method: "running" });
  }

  /**
   * Predict with the version of a model that this device runs, and with what it has learned for itself. Array in, array
   * out where the model has one input and one output; else records. Rejects with ClientError where it runs none.
   */
  predict(model: string, x: NdArray): Promise<NdArray>;
  predict(model: string, x: Examples): Promise<Record<string, NdArray>>;
  predict(model: string, x: NdArray | Examples): Promise<NdArray | Record<string, NdArray>> {
    return this.call({ method: "predict", model, x });
  }

  /** End `runForever`. The round that is under way goes on when the device does, unless its task is asynchronous. */
  stop(): void {
    this.post({ type: "stop" });
  }

  /** Take part in nothing until `resume`, also after the page was loaded again. */
  pause(reason = ""): Promise<void> {
    return this.call({ method: "pause", reason });
  }

  resume(): Promise<void> {
    return this.call({ method: "resume" });
  }

  /**
   * Replace the device's key by a new one; its id stays. false if the server cannot do that now, such as during a round
   * of this device: then every check-in tries again. Rejects with CertificateError after eight replacements.
   */
  rotateKey(): Promise<boolean> {
    return this.call({ method: "rotateKey" });
  }

  /** What this device is, what it did and sent, and what that cost its examples. */
  report(): Promise<DeviceReport> {
    return this.call({ method: "report" });
  }

  /** Destroy the device's keys, state, journal and enrolment. Nothing can be called afterwards. */
  async erase(): Promise<void> {
    await this.call({ method: "erase" });
    this.end();
  }

  /** End it as closing the tab does, and let another tab be the device. Nothing can be called afterwards. */
  async close(): Promise<void> {
    await this.call({ method: "close" });
    this.end();
  }

  /** Part of `close`. */
  end(): void {
    this.worker.terminate();
    this.calls.failAll(new ClientError("this device was closed; open it again"));
  }

  private call<T>(ask: Ask): Promise<T> {
    return this.calls.start((call) => this.post({ type: "call", call, ask }));
  }

  private post(message: ToWorker): void {
    this.worker.postMessage(message);
  }

  private async receive(message: FromWorker): Promise<void> {
    if (message.type === "event") this.callbacks.onEvent?.(message.event);
    else if (message.type === "ask") await this.answer(message.call, message.ask);
    else this.calls.settle(message, errorOf);
  }

  private async answer(call: number, ask: AskPage): Promise<void> {
    try {
      const { examples, mayWork } = this.callbacks;
      const result = ask.method === "examples" ? await examples() : ((await mayWork?.()) ?? true);
      this.post({ type: "result", call, result });
    } catch (error) {
      this.post(failure(call, error));
    }
  }
}
