import { readFileSync } from "node:fs";
import { fileURLToPath } from "node:url";

import { defineConfig } from "vite";

/**
 * The publisher's public key as it is while the page is built, so that it is part of the page: whoever can exchange the
 * files that the page fetches later cannot exchange this.
 */
function publisherKey(): string {
  const path = fileURLToPath(new URL("public/model/publisher.json", import.meta.url));
  const { key } = JSON.parse(readFileSync(path, "utf8")) as { key?: unknown };
  if (typeof key !== "string" || !/^[0-9a-f]{64}$/.test(key)) throw new Error(`${path}: no key of 64 hexadecimal digits`);
  return key;
}

/** The demo page as a folder of files that works below any path. */
export default defineConfig({
  base: "./",
  define: { PUBLISHER_KEY: JSON.stringify(publisherKey()) },
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
