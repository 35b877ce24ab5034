/** What runs in a worker: it holds runtimes of a page and does what the page asks. */

import type { FitOptions } from "../api.js";
import { loadCore } from "../core.js";
import { RuntimeInputError } from "../errors.js";
import { fetchPatiently } from "../fetching.js";
import type { Builds } from "../runtime/delegates.js";
import type { RuntimeCore } from "../runtime/runtime.js";
import { buffersOf, type FromWorker, type Loaded, type Request, type ToWorker } from "./messages.js";

interface Scope {
  readonly name?: string;
  onmessage: ((event: MessageEvent<ToWorker>) => void) | null;
  postMessage(message: FromWorker, transfer?: Transferable[]): void;
}

const scope = globalThis as unknown as Scope;
const cores = new Map<number, RuntimeCore>();
/** Of the calls that are being answered. */
const aborting = new Map<number, AbortController>();
/** Closed, perhaps before they were loaded. */
const closed = new Set<number>();

/** Answer the page with the builds of ONNX Runtime that this worker's script has. */
export function serve(builds: Builds): void {
  // Where a bundler makes one file of a worker, ONNX Runtime starts its threads with that file too.
  if (scope.name?.startsWith("em-pthread")) return;
  // ONNX Runtime fetches its WebAssembly by itself, and gives up at the first refusal.
  globalThis.fetch = fetchPatiently;
  scope.onmessage = ({ data }) => {
    if (data.type === "call") {
      void answer(data.call, data.core, data.request, builds);
      return;
    }
    if (data.type === "abort") {
      aborting.get(data.call)?.abort();
      return;
    }
    const core = cores.get(data.core);
    core?.[data.signal]();
    if (data.signal !== "close") return;
    cores.delete(data.core);
    closed.add(data.core);
  };
}

async function answer(call: number, id: number, request: Request, builds: Builds): Promise<void> {
  try {
    const result = await run(call, id, request, builds);
    // A manifest has no buffers; arrays are handed over, not copied.
    const delegateReason = cores.get(id)?.delegateReason ?? "";
    scope.postMessage({ type: "result", call, result, delegateReason }, [...buffersOf(result)]);
  } catch (error) {
    const { name, message } = error instanceof Error ? error : new Error(String(error));
    scope.postMessage({ type: "error", call, name, message });
  } finally {
    aborting.delete(call);
  }
}

async function run(call: number, id: number, request: Request, builds: Builds): Promise<unknown> {
  if (request.method === "load") {
    const core = await loadCore(request.file, request.options, builds);
    if (closed.has(id)) {
      core.close();
      throw new RuntimeInputError("this runtime was closed while it was loaded");
    }
    cores.set(id, core);
    const { manifest, digest, delegate, restored, storageProblem } = core;
    return { manifest, digest, delegate, restored, storageProblem } satisfies Loaded;
  }
  const core = cores.get(id);
  if (core === undefined) throw new RuntimeInputError("this runtime is closed; load the bundle again");
  const controller = new AbortController();
  aborting.set(call, controller);
  const { signal } = controller;
  switch (request.method) {
    case "predict":
      return core.predict(request.x as never);
    case "evaluate":
      return core.evaluate(request.options);
    case "fit": {
      const { watched, ...options } = request.options;
      return core.fit({ ...options, signal, ...(watched ? watchers(call) : {}) });
    }
    case "localRound": {
      const { watched, ...options } = request.options;
      return core.localRound({ ...options, signal, ...(watched ? { onStep: watchers(call).onStep } : {}) });
    }
    case "parameters":
      return core.parameters();
    case "setParameters":
      return core.setParameters(request.parameters);
    case "reset":
      return core.reset(request.what);
    case "save":
      return core.save(request.slot);
  }
}

function watchers(call: number): Required<Pick<FitOptions, "onStep" | "onEpoch">> {
  return {
    onStep: (progress) => void scope.postMessage({ type: "step", call, progress }),
    onEpoch: (progress) => void scope.postMessage({ type: "epoch", call, progress }),
  };
}
