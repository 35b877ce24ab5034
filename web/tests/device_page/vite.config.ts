import { readFileSync } from "node:fs";
import { fileURLToPath } from "node:url";

import { defineConfig, type Plugin } from "vite";

const at = (path: string): string => fileURLToPath(new URL(path, import.meta.url));

/** The TypeScript for devices of docs/browser.md as a module. */
function snippet(): Plugin {
  return {
    name: "snippet",
    resolveId: (source) => (source === "virtual:snippet.ts" ? source : undefined),
    load(id) {
      if (id !== "virtual:snippet.ts") return undefined;
      const page = readFileSync(at("../../../docs/browser.md"), "utf8");
      const blocks = Array.from(page.matchAll(/^```ts\n(.*?)^```$/gms), (match) => match[1] ?? "");
      return blocks.filter((block) => block.includes("archipel-web/device")).join("\n");
    },
  };
}

/** The page that is a device, as a folder of files. */
export default defineConfig({
  base: "./",
  publicDir: false,
  plugins: [snippet()],
  resolve: { alias: { "archipel-web/device": at("../../src/device/index.ts") } },
  worker: { format: "es" },
  optimizeDeps: { exclude: ["onnxruntime-web"] },
  build: { target: "es2022", outDir: "dist", emptyOutDir: true, modulePreload: { polyfill: false } },
});
