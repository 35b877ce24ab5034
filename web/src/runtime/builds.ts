/** Both builds of ONNX Runtime as chunks of their own, fetched when they are first needed. */

import type { Builds, Ort } from "./delegates.js";

export const BUILDS: Builds = {
  wasm: async () => (await import("onnxruntime-web/wasm")) as typeof Ort,
  webgpu: async () => (await import("onnxruntime-web/jspi")) as typeof Ort,
};
