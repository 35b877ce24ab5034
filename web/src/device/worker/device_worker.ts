/**
 * The worker in which a device lives: training, masks, messages to the server, and what is kept. A worker's timers go
 * on while its page is in the background, where browsers slow those of the page down.
 *
 * The import of ONNX Runtime is no dynamic one, as many bundlers make a single file of a worker.
 */

import * as ort from "onnxruntime-web/wasm";

import { openEngine, type Ort } from "../../runtime/delegates.js";
import { fetchPatiently } from "../../fetching.js";
import { databaseName, DeviceAgent, type Page } from "../agent.js";
import { configOf } from "../config.js";
import { ClientError, errorOf } from "../errors.js";
import { acquireLock, type Lock } from "../lock.js";
import { type Ask, type AskPage, Calls, failure, type FromWorker, type ToWorker } from "./messages.js";

interface Scope {
  readonly name?: string;
  onmessage: ((event: MessageEvent<ToWorker>) => void) | null;
  postMessage(message: FromWorker): void;
}

const scope = globalThis as unknown as Scope;
/** For the device's own requests, which wait as its owner's settings say. */
const once = globalThis.fetch.bind(globalThis);
const asked = new Calls();
let agent: DeviceAgent | null = null;
let lock: Lock | null = null;

function askPage<T>(ask: AskPage): Promise<T> {
  return asked.start((call) => scope.postMessage({ type: "ask", call, ask }));
}

async function answer(call: number, ask: Ask): Promise<void> {
  try {
    scope.postMessage({ type: "result", call, result: await carryOut(ask) });
  } catch (error) {
    scope.postMessage(failure(call, error));
  }
}

async function carryOut(ask: Ask): Promise<unknown> {
  if (ask.method === "open") return open(ask);
  if (agent === null) throw new ClientError("this device was closed or erased; open it again");
  switch (ask.method) {
    case "enrol":
      return agent.enrol(ask.token);
    case "pause":
      return agent.pause(ask.reason);
    case "predict":
      return agent.predict(ask.model, ask.x);
    case "close":
      agent.close();
      return end();
    case "erase":
      await agent.erase();
      return end();
    case "deviceId":
      return agent.deviceId;
    default:
      return agent[ask.method]();
  }
}

async function open({ settings, wait, conditions }: Extract<Ask, { method: "open" }>): Promise<string> {
  const page: Page = {
    examples: () => askPage({ method: "examples" }),
    mayWork: conditions ? () => askPage<boolean | string>({ method: "mayWork" }) : null,
    onEvent: (event) => scope.postMessage({ type: "event", event }),
    fetch: once,
    engine: () => openEngine("wasm", 1, { wasm: async () => ort as unknown as typeof Ort }),
  };
  lock = await acquireLock(databaseName(configOf(settings).name), wait);
  try {
    agent = await DeviceAgent.open(settings, page);
  } catch (error) {
    end();
    throw error;
  }
  return agent.deviceId;
}

function end(): void {
  agent = null;
  lock?.release();
  lock = null;
}

// Where a bundler makes one file of a worker, ONNX Runtime starts its threads with that file too.
if (!scope.name?.startsWith("em-pthread")) {
  // ONNX Runtime fetches its WebAssembly by itself, and gives up at the first refusal.
  globalThis.fetch = fetchPatiently;
  scope.onmessage = ({ data }) => {
    if (data.type === "call") void answer(data.call, data.ask);
    else if (data.type === "stop") agent?.stop();
    else asked.settle(data, errorOf);
  };
}
