/** The library in a real page, with a function that tests call from outside. */

import { load, type NdArray } from "../../src/index.js";

/** Arrays come as base64 of their bytes. */
interface Job {
  bundle: string;
  key: string;
  x: string;
  dims: number[];
  y: number[];
  fit: { epochs: number; batchSize: number; shuffle: boolean; seed: number; hyperparameters: Record<string, number> };
}

declare global {
  interface Window {
    /** Runs what docs/browser.md shows. */
    snippets?: () => Promise<unknown>;
    learn?: (job: Job) => Promise<{ losses: number[]; logits: number[]; delegate: string; isolated: boolean }>;
  }
}

const bytes = (text: string): Uint8Array<ArrayBuffer> => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));

// @ts-expect-error: the build makes this module of the documentation
window.snippets = () => import("virtual:snippets.ts");

window.learn = async (job) => {
  const runtime = await load(bytes(job.bundle), { trustedKeys: [job.key], delegate: "wasm" });
  const x: NdArray = { dtype: "float32", dims: job.dims, data: new Float32Array(bytes(job.x).buffer) };
  const y: NdArray = { dtype: "int64", dims: [job.y.length], data: BigInt64Array.from(job.y, BigInt) };
  const { losses } = await runtime.fit({ x, y, ...job.fit });
  const logits = await runtime.predict(x);
  const { delegate } = runtime;
  runtime.close();
  return { losses, logits: Array.from(logits.data as Float32Array), delegate, isolated: crossOriginIsolated };
};
