import { readFileSync } from "node:fs";
import { fileURLToPath } from "node:url";

import { defineConfig, type Plugin } from "vite";

const at = (path: string): string => fileURLToPath(new URL(path, import.meta.url));

/** The TypeScript of docs/browser.md as a module, with the publisher's key put in. */
function snippets(): Plugin {
  return {
    name: "snippets",
    resolveId: (source) => (source === "virtual:snippets.ts" ? source : undefined),
    load(id) {
      if (id !== "virtual:snippets.ts") return undefined;
      const page = readFileSync(at("../../../docs/browser.md"), "utf8");
      // What is for devices is run by tests/device_page.
      const blocks = Array.from(page.matchAll(/^```ts\n(.*?)^```$/gms), (match) => match[1] ?? "").filter(
        (block) => !block.includes("archipel-web/device"),
      );
      const { key } = JSON.parse(readFileSync(at("../../demo/public/model/publisher.json"), "utf8"));
      return blocks.join("\n").replace(/"0{64}"/, JSON.stringify(key));
    },
  };
}

/** The page that tests drive, as a folder of files. */
export default defineConfig({
  base: "./",
  publicDir: at("../../demo/public"),
  plugins: [snippets()],
  resolve: { alias: { "archipel-web": at("../../src/index.ts") } },
  worker: { format: "es" },
  optimizeDeps: { exclude: ["onnxruntime-web"] },
  build: { target: "es2022", outDir: "dist", emptyOutDir: true, modulePreload: { polyfill: false } },
});
