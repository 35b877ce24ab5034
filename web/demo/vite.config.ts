import { defineConfig } from "vite";

/** The demo page as a folder of files that works below any path. */
export default defineConfig({
  base: "./",
  worker: { format: "es" },
  optimizeDeps: { exclude: ["onnxruntime-web"] },
  build: {
    target: "es2022",
    outDir: "dist",
    emptyOutDir: true,
    modulePreload: { polyfill: false },
    // A picture inlined as data: would be one more thing for the page's security policy to allow.
    assetsInlineLimit: 0,
  },
});
