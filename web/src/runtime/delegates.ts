/**
 * The two ways to run a graph in a browser: WebAssembly with SIMD, and WebGPU.
 *
 * Each is a build of ONNX Runtime Web that is fetched when it is first needed, from where the page itself comes from;
 * the smaller one has no WebGPU.
 */

import type * as Ort from "onnxruntime-web";

import { RuntimeProgramError } from "../errors.js";

export type { Ort };

export type Delegate = "wasm" | "webgpu";
export type DelegateChoice = "auto" | Delegate;

/** A build of ONNX Runtime that is ready, the provider to use, and why that one. */
export interface Engine {
  readonly ort: typeof Ort;
  readonly delegate: Delegate;
  readonly reason: string;
  /** Whether a program that WebGPU cannot run may go to WebAssembly. */
  readonly mayFallBack: boolean;
}

/** The engine for a choice. "auto" takes WebGPU where the browser has it; raises RuntimeProgramError if asked in vain. */
export async function openEngine(choice: DelegateChoice, threads: number): Promise<Engine> {
  if (choice === "wasm") return wasmEngine("asked for", threads);
  const obstacle = await webGpuObstacle();
  if (obstacle === null) {
    try {
      const ort = (await import("onnxruntime-web/jspi")) as typeof Ort;
      configure(ort, threads);
      const reason = choice === "auto" ? "this browser has it" : "asked for";
      return { ort, delegate: "webgpu", reason, mayFallBack: choice === "auto" };
    } catch (error) {
      if (choice === "webgpu") throw new RuntimeProgramError(`WebGPU build cannot be loaded: ${String(error)}`);
      return wasmEngine(`the WebGPU build cannot be loaded: ${String(error)}`, threads);
    }
  }
  if (choice === "webgpu")
    throw new RuntimeProgramError(`WebGPU cannot be used here: ${obstacle}; use "auto" or "wasm"`);
  return wasmEngine(`no WebGPU: ${obstacle}`, threads);
}

/** The same engine without WebGPU: its build has both providers. */
export function withoutWebGpu(engine: Engine, reason: string): Engine {
  return { ort: engine.ort, delegate: "wasm", reason, mayFallBack: false };
}

async function wasmEngine(reason: string, threads: number): Promise<Engine> {
  const ort = (await import("onnxruntime-web/wasm")) as typeof Ort;
  configure(ort, threads);
  return { ort, delegate: "wasm", reason, mayFallBack: false };
}

function configure(ort: typeof Ort, threads: number): void {
  ort.env.logLevel = "error";
  // Threads need shared memory, which browsers give to isolated pages only.
  ort.env.wasm.numThreads = globalThis.crossOriginIsolated === true ? threads : 1;
}

interface Gpu {
  requestAdapter(): Promise<unknown>;
}

async function webGpuObstacle(): Promise<string | null> {
  const gpu = (globalThis.navigator as { gpu?: Gpu } | undefined)?.gpu;
  if (gpu === undefined) return "this browser has none";
  if (!("Suspending" in WebAssembly)) return "this browser cannot suspend WebAssembly (JSPI)";
  try {
    return (await gpu.requestAdapter()) === null ? "there is no adapter" : null;
  } catch (error) {
    return `the adapter cannot be had: ${String(error)}`;
  }
}
