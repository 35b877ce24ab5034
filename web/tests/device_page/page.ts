/** A page that is a device, with functions that tests call from outside. */

import { type Device, type DeviceEvent, type DeviceReport, openDevice, type Outcome } from "../../src/device/index.js";
import { replay } from "../replay.js";
import { replayNeighbours } from "../replay_neighbours.js";

interface Setup {
  /** Of the linear model of tests/support/linear_bundle.py: rows of three numbers, and their labels. */
  readonly x: readonly number[];
  readonly y: readonly number[];
  readonly settings?: object;
  readonly wait?: boolean;
}

declare global {
  interface Window {
    device: Device;
    events: DeviceEvent[];
    may: boolean | string;
  }
  // What tests call.
  var start: (setup: Setup) => Promise<string>;
  var enrol: (token: string) => Promise<string>;
  var until: (kind: Outcome["kind"], seconds: number) => Promise<Outcome>;
  var work: () => void;
  var report: () => Promise<DeviceReport>;
  /** Which steps of a device of vectors/protocol/round.json come out the same here. */
  var replayed: (round: object, index: number) => Promise<string[]>;
  /** The same of vectors/protocol/neighbours.json. */
  var replayedNeighbours: (round: object, index: number) => Promise<string[]>;
  /** Runs what docs/browser.md shows. */
  var snippet: () => void;
}

window.events = [];
window.may = true;

globalThis.start = async ({ x, y, settings = {}, wait = false }) => {
  window.device = await openDevice({
    ...settings,
    wait,
    allowDevelopment: true,
    examples: () => ({
      x: { dtype: "float32", dims: [y.length, 3], data: Float32Array.from(x) },
      y: { dtype: "float32", dims: [y.length], data: Float32Array.from(y) },
    }),
    onEvent: (event) => window.events.push(event),
    mayWork: () => window.may,
  });
  return window.device.deviceId();
};

globalThis.enrol = (token) => window.device.enrol(token);

/** Call `runOnce` until its outcome is of that kind. */
globalThis.until = async (kind, seconds) => {
  const deadline = Date.now() + 1000 * seconds;
  for (;;) {
    const outcome = await window.device.runOnce();
    if (outcome.kind === kind) return outcome;
    if (Date.now() > deadline) throw new Error(`no ${kind}: ${JSON.stringify([outcome, window.events.slice(-8)])}`);
    await new Promise((done) => setTimeout(done, 1000 * outcome.wait));
  }
};

/** Take part in rounds until the page is closed. */
globalThis.work = () => {
  void window.device.runForever().catch((error: unknown) => console.error(String(error)));
};

// @ts-expect-error: the build makes this module of the documentation
globalThis.snippet = () => void import("virtual:snippet.ts");

globalThis.replayed = replay;

globalThis.replayedNeighbours = replayNeighbours;

globalThis.report = () => window.device.report();
