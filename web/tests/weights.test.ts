/** Graphs and weights that are signed and yet wrong. */

import { describe, expect, test } from "vitest";

import { readWeights, weightsLayout, writeWeights } from "../src/bundle/weights.js";
import * as errors from "../src/errors.js";
import { load } from "../src/index.js";
import { fixture } from "./fixture.js";
import { filesOf, withFile } from "./forge.js";

const { bundle, numbers } = fixture("mlp");
const FILES = filesOf(bundle);

describe("graphs and weights that are signed and yet wrong", () => {
  test("a graph that is none", async () => {
    const file = await withFile(bundle, "predict.onnx", Buffer.from("nonsense"));
    const opened = load(file, { trustedKeys: [numbers.publicKey], delegate: "wasm" });
    await expect(opened).rejects.toThrow(errors.UnsafeGraphError);
  });

  test("the graph of another program", async () => {
    const file = await withFile(bundle, "predict.onnx", FILES.get("evaluate.onnx") as Uint8Array);
    const rt = await load(file, { trustedKeys: [numbers.publicKey], delegate: "wasm" });
    const x = { dtype: "float32", dims: [1, 12], data: new Float32Array(12) };
    await expect(rt.predict(x)).rejects.toThrow(/the manifest and the graph disagree about its inputs/);
  });

  const weights = FILES.get("weights.safetensors") as Uint8Array;
  const header = (text: string, data = 0): Uint8Array => {
    const bytes = Buffer.from(text);
    const file = Buffer.alloc(8 + bytes.length + data);
    file.writeBigUInt64LE(BigInt(bytes.length));
    bytes.copy(file, 8);
    return new Uint8Array(file);
  };
  const one = (entry: string, data = 0): Uint8Array => header(`{"a":${entry}}${" ".repeat(88)}`.slice(0, 88), data);

  test.each<[what: string, file: Uint8Array, message: RegExp]>([
    ["empty", new Uint8Array(), /too short/],
    [
      "a header longer than the file",
      Buffer.concat([Buffer.from("ffffffffffffff7f", "hex"), weights]),
      /header length/,
    ],
    ["not JSON", header("{]"), /header: expected a key/],
    ["a list", header("[]"), /expected an object/],
    ["a tensor twice", header('{"a":1,"a":2}'), /there twice/],
    ["an unknown dtype", one('{"dtype":"Q4","shape":[],"data_offsets":[0,4]}', 4), /dtype "Q4"/],
    ["an unknown field", one('{"dtype":"U8","shape":[],"data_offsets":[0,1],"x":1}', 1), /unknown field/],
    ["a hole", one('{"dtype":"U8","shape":[1],"data_offsets":[1,2]}', 2), /starts at byte 97, expected 96/],
    ["something after", one('{"dtype":"U8","shape":[1],"data_offsets":[0,1]}', 2), /tensors end at byte 97/],
    ["offsets that do not fit", one('{"dtype":"F32","shape":[2],"data_offsets":[0,4]}', 4), /needs 8 bytes/],
    ["negative offsets", one('{"dtype":"U8","shape":[1],"data_offsets":[-1,0]}'), /offsets are \[-1,0\]/],
    ["three offsets", one('{"dtype":"U8","shape":[0],"data_offsets":[0,0,0]}'), /offsets are/],
    ["an overflow", one('{"dtype":"U8","shape":[2147483648,2147483648],"data_offsets":[0,1]}'), /2 GiB/],
    ["a negative dimension", one('{"dtype":"U8","shape":[-1],"data_offsets":[0,-1]}'), /shape \[-1\]/],
    ["an unprintable name", header('{"a\\u0000":{"dtype":"U8","shape":[],"data_offsets":[0,1]}}', 1), /printable/],
    ["misaligned", header('{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}} ', 4), /misaligned/],
  ])("weights: %s", (_, file, message) => {
    expect(() => weightsLayout(file)).toThrow(errors.TensorLayoutError);
    expect(() => weightsLayout(file)).toThrow(message);
  });

  test("weights are written so that they are read the same", () => {
    const tensors = new Map([
      ["z", { dtype: "uint8", dims: [3], data: Uint8Array.of(1, 2, 3) }],
      ["personal/a", { dtype: "float64", dims: [], data: Float64Array.of(0.1) }],
      ["b", { dtype: "int64", dims: [2, 0], data: new BigInt64Array() }],
      ["c", { dtype: "float16", dims: [1], data: Uint16Array.of(0x3c00) }],
    ]);
    const read = readWeights(writeWeights(tensors));
    expect(Object.fromEntries(read)).toEqual(Object.fromEntries(tensors));
  });
});
