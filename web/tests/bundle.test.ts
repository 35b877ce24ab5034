/** A bundle file that is not what it says it is: each way has its own error. */

import { describe, expect, test } from "vitest";

import { MAX_MANIFEST_BYTES } from "../src/bundle/manifest.js";
import { hex, sha256 } from "../src/bundle/digests.js";
import { openBundle, verifySignature } from "../src/bundle/reader.js";
import { readWeights, writeWeights } from "../src/bundle/weights.js";
import * as errors from "../src/errors.js";
import { load } from "../src/index.js";
import { keyBytes } from "../src/source.js";
import { fixture } from "./fixture.js";
import { filesOf, type Headers, pack, withFile, withManifest } from "./forge.js";

const { bundle, numbers, load: loadFixture } = fixture("mlp");
const KEYS = keyBytes([numbers.publicKey]);
const FILES = filesOf(bundle);

async function refusal(file: Uint8Array): Promise<Error> {
  const outcome = await openBundle(file, KEYS).catch((error: unknown) => error);
  expect(outcome).toBeInstanceOf(Error);
  return outcome as Error;
}

test("a development key counts only where it is allowed", async () => {
  // Of tests/support/development.py: its SHA-256 begins with 16 zero bits. It has signed "manifest".
  const [key] = keyBytes(["49828b2ad9dde3e85948bd84d732e6c69fe19e1508360733c335302ff5cef8f8"]);
  const signature = Buffer.from(
    "90042bfc5e97c0e5e51e673b6d9770ebb4b79dbb96a4db678dae5d1e7d9afc56" +
      "dcbd8d610af86210c834f11ca1c84c976b8307a8871e86e732f3581cba26150d",
    "hex",
  );
  const manifest = new TextEncoder().encode("manifest");
  const keys = [...KEYS, key as Uint8Array];
  await expect(verifySignature(manifest, signature, keys)).rejects.toThrow(/signed with a development key/);
  await expect(verifySignature(manifest, signature, keys, true)).resolves.toBe(hex(key as Uint8Array));
  await expect(verifySignature(manifest, signature, KEYS, true)).rejects.toThrow(/none of the 1 trusted keys/);
});

describe("a sound bundle", () => {
  test("opens, with the digest of its manifest, and its tensors aligned", async () => {
    const opened = await openBundle(bundle, KEYS);
    expect(opened.digest).toBe(await sha256(FILES.get("manifest.json") as Uint8Array));
    expect(opened.manifest.name).toBe("mlp");
    expect(Object.keys(opened.manifest.programs).sort()).toEqual([
      "evaluate",
      "finish",
      "predict",
      "refresh",
      "several",
      "train",
      "train_8",
    ]);
    expect([...opened.parameters().keys()]).toEqual(opened.manifest.parameters.map(({ name }) => name));
  });

  test("may have a model card, which no browser reads", async () => {
    const opened = await openBundle(await withFile(bundle, "card.json", new TextEncoder().encode("{}")), KEYS);
    expect(opened.manifest.name).toBe("mlp");
  });

  test("is laid out as the tests' own writer does", () => {
    expect(Buffer.compare(pack(FILES), bundle)).toBe(0);
  });

  test("is opened by the second of two keys, and by none of others", async () => {
    const other = new Uint8Array(32).fill(7);
    await expect(openBundle(bundle, [other, ...KEYS])).resolves.toBeDefined();
    await expect(openBundle(bundle, [other])).rejects.toThrow(errors.SignatureError);
    await expect(openBundle(bundle, [])).rejects.toThrow(/no trusted keys/);
  });

  test("cannot be changed by its caller afterwards", async () => {
    const mine = bundle.slice();
    const opened = await openBundle(mine, KEYS);
    mine.fill(0);
    expect(await sha256(opened.weights as Uint8Array)).toBe(opened.manifest.files["weights.safetensors"]);
  });

  test.each<[what: string, source: unknown]>([
    ["ArrayBuffer", bundle.slice().buffer],
    ["Uint8Array", bundle],
    ["Blob", new Blob([bundle.slice()])],
    ["address", `data:application/octet-stream;base64,${Buffer.from(bundle).toString("base64")}`],
  ])("loads from %s", async (_, source) => {
    const rt = await load(source as Uint8Array, { trustedKeys: [numbers.publicKey], delegate: "wasm" });
    expect(rt.manifest.name).toBe("mlp");
    rt.close();
  });

  test.each<[what: string, keys: unknown]>([
    ["short", ["00"]],
    ["not hexadecimal", ["z".repeat(64)]],
    ["31 bytes", [new Uint8Array(31)]],
    ["none", undefined],
  ])("key that is %s", async (_, trustedKeys) => {
    await expect(load(bundle, { trustedKeys: trustedKeys as string[] })).rejects.toThrow(errors.SignatureError);
  });

  test("a delegate that does not exist, and one that is not here", async () => {
    await expect(loadFixture({ delegate: "tpu" as never })).rejects.toThrow(/expected "auto", "wasm" or "webgpu"/);
    await expect(loadFixture({ delegate: "webgpu" })).rejects.toThrow(/WebGPU cannot be used here/);
  });
});

describe("tampering", () => {
  test.each([...FILES.keys()])("one bit of %s", async (name) => {
    const data = FILES.get(name) as Uint8Array;
    for (const at of [0, Math.floor(data.length / 2), data.length - 1]) {
      const changed = data.slice();
      changed[at] = (changed[at] as number) ^ 1;
      const error = await refusal(pack(new Map([...FILES, [name, changed]])));
      const signedPart = name === "manifest.json" || name === "manifest.sig";
      expect(error).toBeInstanceOf(signedPart ? errors.SignatureError : errors.DigestError);
    }
  });

  test("a file that is missing, and one too many", async () => {
    const fewer = new Map(FILES);
    fewer.delete("train.onnx");
    expect((await refusal(pack(fewer))).message).toMatch(/train\.onnx is missing/);
    const more = await refusal(pack(new Map([...FILES, ["extra.bin", new Uint8Array(3)]])));
    expect(more).toBeInstanceOf(errors.UnsafePathError);
  });

  test("a signature over something else, of another length, of zeros", async () => {
    const manifest = FILES.get("manifest.json") as Uint8Array;
    for (const signature of [new Uint8Array(64), new Uint8Array(0), new Uint8Array(65)]) {
      await expect(verifySignature(manifest, signature, KEYS)).rejects.toThrow(errors.SignatureError);
    }
    // The point of small order under which forgeries verify in careless implementations.
    const identity = new Uint8Array(32);
    identity[0] = 1;
    const forged = new Uint8Array(64);
    forged[0] = 1;
    const outcome = await verifySignature(manifest, forged, KEYS).catch((error: unknown) => error);
    expect(outcome).toBeInstanceOf(errors.SignatureError);
  });

  test("a parameter whose own digest is another", async () => {
    const file = await withManifest(bundle, (manifest) => {
      manifest.parameters[0].sha256 = "0".repeat(64);
    });
    expect((await refusal(file)).message).toMatch(/its bytes differ from the manifest's SHA-256/);
  });

  test("a parameter of another shape in the weights", async () => {
    const weights = readWeights(FILES.get("weights.safetensors") as Uint8Array);
    const [name, array] = [...weights][0] as [string, { dims: number[] }];
    array.dims = [1, ...array.dims];
    const error = await refusal(await withFile(bundle, "weights.safetensors", writeWeights(weights)));
    expect(error).toBeInstanceOf(errors.TensorLayoutError);
    expect(error.message).toContain(`parameter ${name}`);
  });
});

describe("zip tricks", () => {
  const end = bundle.length - 22;
  const edited = (at: number, ...bytes: number[]): Uint8Array => {
    const copy = bundle.slice();
    copy.set(bytes, at);
    return copy;
  };
  const renamed = (first: string, second: string): Uint8Array =>
    pack(new Map(Array.from(FILES, ([name, data]) => [name === first ? second : name, data])));
  const trick = (headers: Headers[string], name = "train.onnx"): Uint8Array => pack(FILES, { [name]: headers });

  test.each<[what: string, file: Uint8Array, kind: new (message: string) => Error, message: RegExp]>([
    ["empty", new Uint8Array(), errors.ArchiveError, /no zip directory/],
    ["text", Buffer.from("not a zip at all, but long enough for one"), errors.ArchiveError, /no zip directory/],
    ["cut", bundle.subarray(0, bundle.length - 1), errors.ArchiveError, /no zip directory/],
    ["something before", Buffer.concat([Buffer.from("x"), bundle]), errors.ArchiveError, /ends at byte/],
    ["something after", Buffer.concat([bundle, Buffer.from("x")]), errors.ArchiveError, /no zip directory/],
    ["comment", edited(end + 20, 1, 0), errors.ArchiveError, /comment/],
    ["other disk", edited(end + 4, 1), errors.ArchiveError, /disks/],
    ["no members", edited(end + 8, 0, 0, 0, 0), errors.ArchiveError, /0 members/],
    ["many members", edited(end + 8, 255, 255, 255, 255), errors.ArchiveError, /65535 members/],
    ["directory elsewhere", edited(end + 16, 0, 0, 0, 0), errors.ArchiveError, /ends at byte/],
    ["manifest not first", pack(new Map([...FILES].reverse())), errors.ArchiveError, /first/],
    ["no signature", renamed("manifest.sig", "other.sig"), errors.ArchiveError, /first/],
    ["path", renamed("train.onnx", "../train.onnx"), errors.UnsafePathError, /plain name/],
    ["absolute path", renamed("train.onnx", "/train.onnx"), errors.UnsafePathError, /plain name/],
    ["backslash", renamed("train.onnx", "a\\train.onnx"), errors.UnsafePathError, /plain name/],
    ["hidden file", renamed("train.onnx", ".train"), errors.UnsafePathError, /plain name/],
    ["empty name", renamed("train.onnx", ""), errors.UnsafePathError, /plain name/],
    ["new line in a name", renamed("train.onnx", "a\n"), errors.UnsafePathError, /plain name/],
    ["twice", trick({ "local.name": "predict.onnx", "central.name": "predict.onnx" }), errors.ArchiveError, /twice/],
    ["two names", trick({ "local.name": "trail.onnx" }), errors.ArchiveError, /differs from the zip directory/],
    ["deflated", trick({ "local.method": 8, "central.method": 8 }), errors.ArchiveError, /compressed/],
    ["two sizes", trick({ "local.bytes": 4, "central.bytes": 4 }), errors.ArchiveError, /compressed/],
    ["encrypted", trick({ "local.flags": 1, "central.flags": 1 }), errors.ArchiveError, /encrypted/],
    ["sizes to follow", trick({ "local.flags": 8, "central.flags": 8 }), errors.ArchiveError, /flags/],
    ["extra field", trick({ extra: "\x01\x00\x00\x00" }), errors.ArchiveError, /extra field/],
    ["checksum", trick({ "local.crc": 1, "central.crc": 1 }), errors.ArchiveError, /checksum/],
    ["two checksums", trick({ "local.crc": 1 }), errors.ArchiveError, /differs from the zip directory/],
    ["overlap", trick({ "central.offset": 0 }), errors.ArchiveError, /overlap/],
    [
      "larger than the file",
      trick({ "local.bytes": 2 ** 31, "local.stored": 2 ** 31, "central.bytes": 2 ** 31, "central.stored": 2 ** 31 }),
      errors.ArchiveError,
      /longer than the file/,
    ],
    [
      "huge manifest",
      trick({ "central.bytes": MAX_MANIFEST_BYTES + 1, "central.stored": MAX_MANIFEST_BYTES + 1 }, "manifest.json"),
      errors.ArchiveError,
      /the limit is 4194304/,
    ],
  ])("%s", async (_, file, kind, message) => {
    const error = await refusal(file);
    expect(error).toBeInstanceOf(kind);
    expect(error.message).toMatch(message);
  });
});
