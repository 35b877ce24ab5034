/** A device in a tab, which may be loaded again after any of its writes and requests. */

import { IDBFactory } from "fake-indexeddb";
import { vi } from "vitest";

import type { NdArray } from "../src/arrays.js";
import type { Bundle } from "../src/bundle/reader.js";
import { DeviceAgent, databaseName } from "../src/device/agent.js";
import type { DeviceSettings } from "../src/device/config.js";
import type { DeviceEvent, Outcome } from "../src/device/events.js";
import type { RoundPlan } from "../src/device/messages/rounds.js";
import { DeviceDatabase } from "../src/device/storage/database.js";
import type { Entry } from "../src/device/storage/entry.js";
import { planLayout, uploadArrays } from "../src/device/updates/uploads.js";
import { BUILDS } from "../src/runtime/builds.js";
import { openEngine } from "../src/runtime/delegates.js";
import { RoundServer } from "./device_server.js";
import { MODEL, openModel, tokenText } from "./device_world.js";

const QUICK = { attempts: 1, backoff: 0.01, maxWait: 0.01, pauseSeconds: 0.01, resumeWithin: 0.05, patience: 0.1 };

/** Counts the writes and requests of a loaded page; what it awaits after the last one of its life never comes. */
class Life {
  done = 0;
  private closed = false;
  private end: () => void = () => undefined;
  readonly over = new Promise<null>((resolve) => (this.end = () => resolve(null)));

  constructor(private readonly most: number) {}

  async step<T>(work: () => Promise<T>): Promise<T> {
    if (this.closed) return this.close();
    const result = await work();
    return ++this.done < this.most ? result : this.close();
  }

  /** The page is closed here and now. */
  close(): Promise<never> {
    this.closed = true;
    this.end();
    return new Promise(() => undefined);
  }
}

/** What a tab needs of its server. */
export interface TabServer {
  readonly bundle: Bundle;
  readonly plan: RoundPlan;
  readonly fetch: typeof globalThis.fetch;
}

/** An enrolled device of a new profile, and the server of its one round. Call `vi.restoreAllMocks` in the end. */
export class Tab<S extends TabServer = RoundServer> {
  events: DeviceEvent[] = [];
  life = new Life(Number.POSITIVE_INFINITY);
  agent = null as never as DeviceAgent;
  private readonly lives = new WeakMap<DeviceDatabase, Life>();
  /** Closes the page when the device reports this. */
  closeAt: DeviceEvent["name"] | null = null;
  /** Closes the page when the server has answered this request ("GET cohort"), which the device never learns. */
  closeAfter = "";

  private constructor(readonly server: S) {}

  static async open(changes: object = {}): Promise<Tab> {
    const bundle = await openModel();
    return Tab.at(await RoundServer.of(bundle, layoutOf(bundle).length, changes));
  }

  /** With another server. */
  static async at<S extends TabServer>(server: S): Promise<Tab<S>> {
    globalThis.indexedDB = new IDBFactory();
    const tab = new Tab(server);
    vi.restoreAllMocks();
    const { write } = DeviceDatabase.prototype;
    vi.spyOn(DeviceDatabase.prototype, "write").mockImplementation(function (this: DeviceDatabase, ...changes) {
      // Every page has a database of its own, so that a closed one writes nothing any more.
      const life = tab.lives.get(this) ?? tab.life;
      tab.lives.set(this, life);
      return life.step(() => write.apply(this, changes));
    });
    await tab.load();
    await tab.agent.enrol(await tokenText("token"));
    return tab;
  }

  /** The page is loaded: only what is in the database is left. It is closed after so many writes and requests. */
  async load(most = Number.POSITIVE_INFINITY, settings: DeviceSettings = {}): Promise<void> {
    const life = new Life(most);
    this.life = life;
    this.agent = await DeviceAgent.open(
      { ...QUICK, ...settings },
      {
        examples: async () => examples(),
        mayWork: null,
        onEvent: (event) => {
          this.events.push(event);
          // The journal, where an event tells of what is in it, was written before.
          if (event.name === this.closeAt) void life.close();
        },
        engine: () => openEngine("wasm", 1, BUILDS),
        fetch: (...given) => life.step(() => this.fetch(life, ...given)),
      },
    );
  }

  private async fetch(life: Life, input: RequestInfo | URL, init: RequestInit = {}): Promise<Response> {
    const response = await this.server.fetch(input, init);
    const [, what] = /^.*\/rounds\/[0-9a-f]+\/?(.*)$/.exec(String(input)) ?? [];
    if (this.closeAfter && this.closeAfter === `${init.method ?? "GET"} ${what}`) return life.close();
    return response;
  }

  /** The device works until its round is over for it (null: until the page is closed). */
  async work(): Promise<Outcome | null> {
    for (;;) {
      const outcome = await Promise.race([this.agent.runOnce(), this.life.over]);
      if (outcome === null || !["waiting", "paused"].includes(outcome.kind)) return outcome;
    }
  }

  /** The one entry of the journal. */
  async entry(): Promise<Entry> {
    const { rounds } = await this.agent.report();
    if (rounds.length !== 1) throw new Error(`${rounds.length} rounds in the journal`);
    return rounds[0] as Entry;
  }

  names(): string[] {
    return this.events.map(({ name }) => name).filter((name) => name !== "waiting");
  }

  /** Do something with the database of the device. */
  async database<T>(work: (database: DeviceDatabase) => Promise<T>): Promise<T> {
    const database = await DeviceDatabase.open(databaseName("device"));
    this.lives.set(database, new Life(Number.POSITIVE_INFINITY));
    try {
      return await work(database);
    } finally {
      database.close();
    }
  }

  /** Where in the store of sealed bytes there is something. */
  kept(): Promise<string[]> {
    return this.database((database) => database.keys("sealed"));
  }

  /** The device's update, computed without masks and messages. */
  async update(): Promise<Uint32Array> {
    const { bundle, plan } = this.server;
    const runtime = await MODEL.load();
    const parameters = Object.fromEntries(bundle.parameters());
    const { arrays, metrics } = await runtime.localRound({ x: examples(), seed: 0, parameters });
    runtime.close();
    const upload = uploadArrays(bundle.manifest, plan.program, arrays, metrics);
    return layoutOf(bundle).encode(upload, plan.modulus_bits, plan.max_cohort);
  }
}

export function layoutOf(bundle: Bundle): ReturnType<typeof planLayout> {
  return planLayout({ program: "", hyperparameters: {} } as unknown as RoundPlan, bundle.manifest);
}

/** Six times the same example, so that no order of theirs matters. */
function examples(): Record<string, NdArray> {
  const six = (array: NdArray): NdArray => {
    const [count = 1, ...dims] = array.dims;
    const size = array.data.length / count;
    const data = array.data.slice(0, 6 * size);
    for (let index = size; index < data.length; index++) data[index] = data[index - size] as never;
    return { ...array, dims: [6, ...dims], data };
  };
  return Object.fromEntries(Object.entries(MODEL.group("data")).map(([name, array]) => [name, six(array)]));
}
