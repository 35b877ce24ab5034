/** Bundles that are signed by the tests' own key, so that what lies behind the signature can be wrong too. */

import { createHash } from "node:crypto";

import { crc32, unpack } from "../src/bundle/archive.js";

// RFC 8410: an Ed25519 private key of 32 bytes in PKCS #8. The bytes 0 ... 31, as in make_fixtures.py.
const PKCS8 = Uint8Array.from([...Buffer.from("302e020100300506032b657004220420", "hex"), ...Array(32).keys()]);

export type Files = Map<string, Uint8Array>;
type Json = { [key: string]: any };

export function filesOf(bundle: Uint8Array): Files {
  return new Map(Array.from(unpack(bundle), ([name, data]) => [name, data.slice()]));
}

export function manifestOf(files: Files): Json {
  return JSON.parse(Buffer.from(files.get("manifest.json") as Uint8Array).toString()) as Json;
}

/** A bundle with another manifest, signed. `text` has the last word on how it is written. */
export async function withManifest(
  bundle: Uint8Array,
  change: (manifest: Json) => void,
  text: (canonical: string) => string = (same) => same,
): Promise<Uint8Array> {
  const files = filesOf(bundle);
  const manifest = manifestOf(files);
  change(manifest);
  files.set("manifest.json", Buffer.from(text(canonical(manifest))));
  return signed(files);
}

/** A bundle whose file has other contents, with a manifest that says so, signed. */
export async function withFile(bundle: Uint8Array, name: string, data: Uint8Array): Promise<Uint8Array> {
  const files = filesOf(bundle);
  files.set(name, data);
  const manifest = manifestOf(files);
  manifest.files[name] = createHash("sha256").update(data).digest("hex");
  files.set("manifest.json", Buffer.from(canonical(manifest)));
  return signed(files);
}

/** A bundle without one of its programs, signed. */
export async function withoutProgram(bundle: Uint8Array, name: string): Promise<Uint8Array> {
  const files = filesOf(bundle);
  const manifest = manifestOf(files);
  const { file } = manifest.programs[name];
  delete manifest.programs[name];
  delete manifest.files[file];
  files.delete(file);
  files.set("manifest.json", Buffer.from(canonical(manifest)));
  return signed(files);
}

export async function signed(files: Files): Promise<Uint8Array> {
  const key = await crypto.subtle.importKey("pkcs8", PKCS8, "Ed25519", false, ["sign"]);
  const manifest = files.get("manifest.json") as Uint8Array<ArrayBuffer>;
  const signature = new Uint8Array(await crypto.subtle.sign("Ed25519", key, new Uint8Array(manifest)));
  return pack(new Map([...files, ["manifest.sig", signature]]));
}

export interface Headers {
  /** Changes to the headers of a member, by field name of `local` and `central` below. */
  readonly [name: string]: { readonly [field: string]: number | string };
}

/** An uncompressed zip; `tricks` changes what its headers say. */
export function pack(files: Files, tricks: Headers = {}): Uint8Array {
  const parts: Uint8Array[] = [];
  const directory: Uint8Array[] = [];
  let at = 0;
  for (const [name, data] of files) {
    const trick = tricks[name] ?? {};
    const number = (field: string, value: number): number => Number(trick[field] ?? value);
    const extra = Buffer.from(String(trick.extra ?? ""));
    const head = (side: "local" | "central"): Buffer => {
      const common = Buffer.alloc(26);
      common.writeUInt16LE(20, 0);
      common.writeUInt16LE(number(`${side}.flags`, 0), 2);
      common.writeUInt16LE(number(`${side}.method`, 0), 4);
      common.writeUInt16LE(0, 6);
      common.writeUInt16LE(0x21, 8);
      common.writeUInt32LE(number(`${side}.crc`, crc32(data)), 10);
      common.writeUInt32LE(number(`${side}.stored`, data.length), 14);
      common.writeUInt32LE(number(`${side}.bytes`, data.length), 18);
      common.writeUInt16LE(Buffer.byteLength(String(trick[`${side}.name`] ?? name)), 22);
      common.writeUInt16LE(extra.length, 24);
      return common;
    };
    const [localName, centralName] = ["local", "central"].map((side) =>
      Buffer.from(String(trick[`${side}.name`] ?? name), "latin1"),
    ) as [Buffer, Buffer];
    const local = Buffer.concat([Buffer.from("PK\x03\x04", "latin1"), head("local"), localName, extra]);
    const tail = Buffer.alloc(14);
    tail.writeUInt32LE(0x01a40000, 6);
    tail.writeUInt32LE(number("central.offset", at), 10);
    const version = Buffer.from([20, 3]);
    const central = [Buffer.from("PK\x01\x02", "latin1"), version, head("central"), tail, centralName, extra];
    directory.push(Buffer.concat(central));
    parts.push(local, data);
    at += local.length + data.length;
  }
  const size = directory.reduce((sum, entry) => sum + entry.length, 0);
  const end = Buffer.alloc(22);
  end.write("PK\x05\x06", "latin1");
  end.writeUInt16LE(files.size, 8);
  end.writeUInt16LE(files.size, 10);
  end.writeUInt32LE(size, 12);
  end.writeUInt32LE(at, 16);
  return new Uint8Array(Buffer.concat([...parts, ...directory, end]));
}

/** Keys of the manifest's numbers that are written with a fraction. */
const FLOATS = new Set([
  "threshold",
  "max_clip",
  "max_value",
  "max_server_lr",
  "dropouts",
  "default",
  "minimum",
  "maximum",
  "init",
  "scale",
  "range",
  "clip",
  "lowest",
  "noise",
  "rtol",
  "atol",
]);

function canonical(value: unknown, key = ""): string {
  if (Array.isArray(value)) return `[${value.map((item) => canonical(item)).join(",")}]`;
  if (typeof value === "object" && value !== null) {
    const entries = Object.entries(value).sort(([a], [b]) => (a < b ? -1 : 1));
    return `{${entries.map(([name, item]) => `${JSON.stringify(name)}:${canonical(item, name)}`).join(",")}}`;
  }
  const text = JSON.stringify(value);
  return typeof value === "number" && FLOATS.has(key) && !/[.e]/.test(text) ? `${text}.0` : text;
}
