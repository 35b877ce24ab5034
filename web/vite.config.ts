import { fileURLToPath } from "node:url";

import { defineConfig } from "vite";

/** The library as files that work below any path: dist/archipel.js, its worker, and ONNX Runtime's WebAssembly. */
export default defineConfig({
  base: "./",
  publicDir: false,
  worker: { format: "es" },
  optimizeDeps: { exclude: ["onnxruntime-web"] },
  build: {
    target: "es2022",
    outDir: "dist",
    emptyOutDir: true,
    modulePreload: { polyfill: false },
    rolldownOptions: {
      input: { archipel: fileURLToPath(new URL("src/index.ts", import.meta.url)) },
      preserveEntrySignatures: "strict",
      output: { entryFileNames: "[name].js" },
    },
  },
});
