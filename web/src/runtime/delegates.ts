/**
 * The two ways to run a graph in a browser: WebAssembly with SIMD, and WebGPU.
 *
 * Each is a build of ONNX Runtime Web from where the page itself comes from; the smaller one has no WebGPU.
 */

import type * as Ort from "onnxruntime-web";

import { RuntimeInputError, RuntimeProgramError } from "../errors.js";

export type { Ort };

export type Delegate = "wasm" | "webgpu";
export type DelegateChoice = "auto" | Delegate;

/** The builds that this thread can get; the one with WebGPU can do without it. */
export type Builds = Partial<Readonly<Record<Delegate, () => Promise<typeof Ort>>>>;

/** A build of ONNX Runtime that is ready, the provider to use, and why that one. */
export interface Engine {
  readonly ort: typeof Ort;
  readonly delegate: Delegate;
  readonly reason: string;
  /** Whether a program that WebGPU cannot run may go to WebAssembly. */
  readonly mayFallBack: boolean;
}

/** Raises RuntimeInputError for what is no choice. */
export function checkChoice(choice: unknown = "auto"): DelegateChoice {
  if (choice === "auto" || choice === "wasm" || choice === "webgpu") return choice;
  throw new RuntimeInputError(`delegate: expected "auto", "wasm" or "webgpu", got ${JSON.stringify(choice)}`);
}

/** The engine for a choice. "auto" takes WebGPU where a GPU has it; raises RuntimeProgramError if asked in vain. */
export async function openEngine(choice: DelegateChoice, threads: number, builds: Builds): Promise<Engine> {
  if (choice === "wasm") return wasmEngine("asked for", threads, builds);
  const obstacle = builds.webgpu === undefined ? await needObstacle(choice) : await webGpuObstacle(choice);
  if (obstacle === null && builds.webgpu !== undefined) {
    try {
      const ort = await builds.webgpu();
      configure(ort, threads);
      const reason = choice === "auto" ? "this browser has it" : "asked for";
      return { ort, delegate: "webgpu", reason, mayFallBack: choice === "auto" };
    } catch (error) {
      if (choice === "webgpu") throw new RuntimeProgramError(`WebGPU build cannot be loaded: ${String(error)}`);
      return wasmEngine(`the WebGPU build cannot be loaded: ${String(error)}`, threads, builds);
    }
  }
  if (choice === "webgpu")
    throw new RuntimeProgramError(`WebGPU cannot be used here: ${obstacle}; use "auto" or "wasm"`);
  return wasmEngine(`no WebGPU: ${obstacle}`, threads, builds);
}

/** The same engine without WebGPU: its build has both providers. */
export function withoutWebGpu(engine: Engine, reason: string): Engine {
  return { ort: engine.ort, delegate: "wasm", reason, mayFallBack: false };
}

async function wasmEngine(reason: string, threads: number, builds: Builds): Promise<Engine> {
  const open = builds.wasm ?? builds.webgpu;
  if (open === undefined) throw new RuntimeProgramError("there is no build of ONNX Runtime here");
  const ort = await open();
  configure(ort, threads);
  return { ort, delegate: "wasm", reason, mayFallBack: false };
}

function configure(ort: typeof Ort, threads: number): void {
  ort.env.logLevel = "error";
  // Threads need shared memory, which browsers give to isolated pages only.
  ort.env.wasm.numThreads = globalThis.crossOriginIsolated === true ? threads : 1;
}

interface AdapterInfo {
  readonly vendor?: string;
  readonly architecture?: string;
  readonly device?: string;
  readonly description?: string;
  readonly isFallbackAdapter?: boolean;
}

interface Adapter {
  readonly info?: AdapterInfo;
  readonly isFallbackAdapter?: boolean;
}

interface Gpu {
  requestAdapter(): Promise<Adapter | null>;
}

/** Drivers that compute on the processor what a GPU should. */
const SOFTWARE = /swiftshader|llvmpipe|lavapipe|softpipe|software|basic render/i;

/** What speaks against WebGPU on this thread, null if nothing does; "webgpu" asks for it on the processor, too. */
export async function webGpuObstacle(choice: DelegateChoice): Promise<string | null> {
  const gpu = (globalThis.navigator as { gpu?: Gpu } | undefined)?.gpu;
  if (gpu === undefined) return "this browser has none";
  if (!("Suspending" in WebAssembly)) return "this browser cannot suspend WebAssembly (JSPI)";
  try {
    const adapter = await gpu.requestAdapter();
    if (adapter === null) return "there is no adapter";
    return choice === "auto" ? softwareObstacle(adapter) : null;
  } catch (error) {
    return `the adapter cannot be had: ${String(error)}`;
  }
}

function softwareObstacle({ info = {}, isFallbackAdapter }: Adapter): string | null {
  const { vendor, architecture, device, description } = info;
  const name = [vendor, architecture, device, description].filter(Boolean).join(" ");
  if (isFallbackAdapter !== true && info.isFallbackAdapter !== true && !SOFTWARE.test(name)) return null;
  return `its adapter is software (${name || "a fallback"}), which is slower than WebAssembly`;
}

async function needObstacle(choice: DelegateChoice): Promise<string> {
  return (await webGpuObstacle(choice)) ?? "the page has none";
}
