/** A manifest that is signed and yet wrong: each rule has its own error. */

import { readFileSync } from "node:fs";

import { describe, expect, test } from "vitest";

import { decodeManifest, MAX_MANIFEST_BYTES } from "../src/bundle/manifest.js";
import { openBundle } from "../src/bundle/reader.js";
import * as errors from "../src/errors.js";
import { keyBytes } from "../src/source.js";
import { fixture } from "./fixture.js";
import { filesOf, withManifest } from "./forge.js";

const { bundle, numbers } = fixture("mlp");
const KEYS = keyBytes([numbers.publicKey]);
const FILES = filesOf(bundle);

async function refusal(file: Uint8Array): Promise<Error> {
  const outcome = await openBundle(file, KEYS).catch((error: unknown) => error);
  expect(outcome).toBeInstanceOf(Error);
  return outcome as Error;
}

/** How an object's text spells the value of a field. */
function spellingOf(object: string, field: string): string {
  return (new RegExp(`"${field}":(\\[[^\\]]*\\]|[^,}]*)`).exec(object) as RegExpExecArray)[1] as string;
}

describe("manifest", () => {
  const program = (manifest: any): any => manifest.programs.train;
  const prediction = (manifest: any): any =>
    manifest.programs.evaluate.inputs.find((port: any) => port.role === "prediction");
  const canonical = Buffer.from(FILES.get("manifest.json") as Uint8Array).toString();

  test.each<[what: string, text: (canonical: string) => string, kind: new (m: string) => Error, message: RegExp]>([
    ["not JSON", () => "{", errors.ManifestError, /expected a key/],
    ["not UTF-8", () => "\ufffd", errors.ManifestError, /expected a value/],
    ["a list", () => "[]", errors.ManifestError, /"format" is missing/],
    ["space", (text) => text.replace(":", ": "), errors.ManifestError, /not canonical/],
    ["a new line at the end", (text) => `${text}\n`, errors.ManifestError, /not canonical/],
    [
      "keys in another order",
      (text) => text.replace(/^\{("files":\{.*?\}),("format":1),/, "{$2,$1,"),
      errors.ManifestError,
      /not canonical/,
    ],
    ["a key twice", (text) => text.replace('"format":1', '"format":1,"format":1'), errors.ManifestError, /there twice/],
    ["a number as 1e1", (text) => text.replace('"bits":16', '"bits":1e1'), errors.ManifestError, /expected an integer/],
    [
      "minus zero",
      (text) => text.replace('"upload_bytes":', '"upload_bytes":-'),
      errors.ManifestError,
      /limits|canonical/,
    ],
    [
      "a float as 10",
      (text) => text.replace('"max_clip":10.0', '"max_clip":10'),
      errors.ManifestError,
      /not canonical/,
    ],
    ["a float with more digits", (text) => text.replace("0.67", "0.670"), errors.ManifestError, /not canonical/],
    ["an escape", (text) => text.replace('"mlp"', '"m\\u006cp"'), errors.ManifestError, /not canonical/],
    ["half a surrogate", (text) => text.replace('"mlp"', '"\\ud800"'), errors.ManifestError, /surrogate/],
    [
      "a default",
      (text) => text.replace('"strategy":', '"self_test":null,"strategy":'),
      errors.ManifestError,
      /twice|canonical/,
    ],
    [
      "steps 1",
      (text) => text.replace('"kind":"predict",', '"kind":"predict","repeats":"",'),
      errors.ManifestError,
      /canonical/,
    ],
    ["infinity", (text) => text.replace('"max_clip":10.0', '"max_clip":1e999'), errors.ManifestError, /out of range/],
    ["NaN", (text) => text.replace('"max_clip":10.0', '"max_clip":NaN'), errors.ManifestError, /expected a value/],
    [
      "a large integer",
      (text) => text.replace('"bits":16', `"bits":${"9".repeat(40)}`),
      errors.ManifestError,
      /beyond 2\^53/,
    ],
    [
      "deep",
      (text) => text.replace('"strategy":"fedavg"', `"strategy":${"[".repeat(9000)}`),
      errors.ManifestError,
      /nested deeper/,
    ],
    ["a byte order mark", (text) => `\ufeff${text}`, errors.ManifestError, /expected a value/],
    ["something after", (text) => `${text}{}`, errors.ManifestError, /something follows/],
    [
      "format 2",
      (text) => text.replace('"format":1', '"format":2'),
      errors.UnknownVersionError,
      /format 2, this library reads format 1/,
    ],
    [
      "format as text",
      (text) => text.replace('"format":1', '"format":"1"'),
      errors.ManifestError,
      /expected an integer/,
    ],
  ])("written with %s", async (_, text, kind, message) => {
    const error = await refusal(await withManifest(bundle, () => undefined, text));
    expect(error.constructor).toBe(kind);
    expect(error.message).toMatch(message);
  });

  test.each<[what: string, change: (manifest: any) => void, kind: new (m: string) => Error, message: RegExp]>([
    ["an unknown field", (m) => void (m.more = 1), errors.ManifestError, /unknown field "more"/],
    [
      "an unknown field of a program",
      (m) => void (program(m).more = 1),
      errors.ManifestError,
      /programs.train: unknown field/,
    ],
    [
      "an unknown field of a port",
      (m) => void (program(m).inputs[0].more = 1),
      errors.ManifestError,
      /inputs\[0\]: unknown/,
    ],
    ["a field missing", (m) => void delete m.limits, errors.ManifestError, /"limits" is missing/],
    ["an unknown role", (m) => void (program(m).inputs[0].role = "secret"), errors.UnknownRoleError, /"secret"/],
    ["no role", (m) => void delete program(m).inputs[0].role, errors.UnknownRoleError, /got none/],
    ["an output role as input", (m) => void (program(m).inputs[0].role = "metric"), errors.UnknownRoleError, /metric/],
    ["an unknown kind", (m) => void (program(m).kind = "run"), errors.ManifestError, /expected one of predict/],
    [
      "an unknown dtype",
      (m) => void (program(m).inputs[0].dtype = "complex"),
      errors.ManifestError,
      /expected one of float16/,
    ],
    [
      "a seed in an analysis",
      (m) => {
        const { file, outputs } = m.programs.finish;
        const update = outputs.filter((p: any) => p.role === "update");
        const seed = { dtype: "uint32", name: "seed", role: "seed", shape: [] };
        m.programs.look = { file, inputs: [seed], kind: "analyze", outputs: update };
      },
      errors.ManifestError,
      /analyze program cannot have 'seed'/,
    ],
    [
      "a running variance without its mean",
      (m) => {
        const [entry] = m.programs.finish.outputs.filter((p: any) => p.role === "update" && p.kind === "delta");
        Object.assign(entry, { kind: "variance", mean: "ghost" });
        delete entry.clip;
      },
      errors.ManifestError,
      /"ghost" is no mean of shape/,
    ],
    [
      "a running mean without its variance",
      (m) => {
        const [entry] = m.programs.finish.outputs.filter((p: any) => p.role === "update" && p.kind === "delta");
        entry.kind = "mean";
        delete entry.clip;
      },
      errors.ManifestError,
      /no variance goes with this mean/,
    ],
    ...(
      [
        ["of a parameter", (e) => void (e.tensor = e.carries.parameters[0]), /its tensor is a parameter/],
        ["without a clip", (e) => void delete e.clip, /only a clipped delta/],
        ["of something else", (e) => void (e.carries.parameters[0] = "ghost"), /"ghost", which is not a float32/],
        ["twice", (e) => void e.carries.parameters.push(e.carries.parameters[0]), /is uploaded twice/],
        ["in odd blocks", (e) => void (e.carries.block = 12), /power of two/],
        ["in too many blocks", (e) => void e.shape[0]++, /have the shape/],
        ["with more than all", (e) => void (e.carries.taken = 1 << 20), /takes 1048576 of/],
        ["by another method", (e) => void (e.carries.method = "zip"), /a method of rotation, largest, low_rank/],
        ["as factors of several", (e) => void (e.carries = { method: "low_rank", parameters: e.carries.parameters }), /of one matrix/],
        ["without a seed", () => undefined, /needs the hyperparameter "update_seed"/],
      ] as [string, (entry: any) => void, RegExp][]
    ).map(
      ([name, change, message]) =>
        [
          `a delta that carries others, ${name}`,
          (m: any) => {
            const { outputs } = m.programs.finish;
            const places = outputs.flatMap((p: any, i: number) => (p.role === "update" && p.kind === "delta" ? [i] : []));
            const shapes = Object.fromEntries(m.parameters.map((p: any) => [p.name, p.shape]));
            const parameters = places.map((i: number) => outputs[i].tensor);
            const size = parameters
              .map((tensor: string) => shapes[tensor].reduce((a: number, b: number) => a * b, 1))
              .reduce((a: number, b: number) => a + b);
            const entry = { ...outputs[places[0]], tensor: "packed", shape: [Math.ceil(size / 8), 8] };
            entry.carries = { method: "rotation", parameters, block: 8 };
            m.programs.finish.outputs = [entry, ...outputs.filter((_: any, i: number) => !places.includes(i))];
            change(entry);
          },
          errors.ManifestError,
          message,
        ] as [string, (manifest: any) => void, typeof errors.ManifestError, RegExp],
    ),
    [
      "a delta with a mean",
      (m) => void Object.assign(m.programs.finish.outputs[0], { mean: "ghost" }),
      errors.ManifestError,
      /mean is of a variance/,
    ],
    [
      "a role that the kind has not",
      (m) => void m.programs.predict.inputs.push({ dtype: "int64", name: "s", role: "example_weight", shape: [] }),
      errors.ManifestError,
      /predict program cannot have 'example_weight'/,
    ],
    [
      "a parameter in an evaluation",
      (m) => {
        const parameter = program(m).inputs.find((p: any) => p.role === "parameter");
        m.programs.evaluate.inputs.push(parameter);
      },
      errors.ManifestError,
      /program "evaluate": a evaluate program cannot have 'parameter' among its inputs/,
    ],
    [
      "an example in an evaluation",
      (m) => void m.programs.evaluate.inputs.push(m.programs.predict.inputs[0]),
      errors.ManifestError,
      /cannot have 'example'/,
    ],
    [
      "a prediction in a train program",
      (m) => void program(m).inputs.push(prediction(m)),
      errors.ManifestError,
      /a train program cannot have 'prediction'/,
    ],
    [
      "an evaluation of nothing",
      (m) => {
        m.programs.evaluate.inputs = m.programs.evaluate.inputs.filter((p: any) => p.role !== "prediction");
      },
      errors.ManifestError,
      /program "evaluate": an evaluate program reads at least one prediction/,
    ],
    [
      "a prediction of no output",
      (m) => void delete prediction(m).output,
      errors.ManifestError,
      /"output" is missing/,
    ],
    [
      "a prediction of an output that predict has not",
      (m) => void (prediction(m).output = "probabilities"),
      errors.ManifestError,
      /program "evaluate": "probabilities" is no output of the one predict program/,
    ],
    [
      "a prediction without predict",
      (m) => {
        delete m.programs.predict;
        delete m.self_test;
      },
      errors.ManifestError,
      /"output" is no output of the one predict program/,
    ],
    [
      "a prediction of one of two",
      (m) => void (m.programs.guess = m.programs.predict),
      errors.ManifestError,
      /"output" is no output of the one predict program/,
    ],
    [
      "a prediction of another dtype",
      (m) => void (prediction(m).dtype = "float16"),
      errors.ManifestError,
      /prediction "prediction" is float16\[batch,4\], predict answers float32\[batch,4\]/,
    ],
    [
      "a prediction of another rank",
      (m) => void prediction(m).shape.push(1),
      errors.ManifestError,
      /prediction "prediction" is float32\[batch,4,1\], predict answers/,
    ],
    [
      "a prediction of another width",
      (m) => void (prediction(m).shape[1] = 5),
      errors.ManifestError,
      /prediction "prediction" is float32\[batch,5\], predict answers/,
    ],
    ["a control character in a name", (m) => void (m.name = "a\u0007"), errors.ManifestError, /printable/],
    ["an empty name", (m) => void (m.name = ""), errors.ManifestError, /printable/],
    ["a long name", (m) => void (m.name = "a".repeat(257)), errors.ManifestError, /1 to 256/],
    ["a bad digest", (m) => void (m.files["train.onnx"] = "abc"), errors.ManifestError, /SHA-256/],
    ["a digest in capitals", (m) => void (m.files["train.onnx"] = "A".repeat(64)), errors.ManifestError, /SHA-256/],
    ["a path as file", (m) => void (m.files["../x"] = "0".repeat(64)), errors.UnsafePathError, /plain name/],
    [
      "its own digest",
      (m) => void (m.files["manifest.json"] = "0".repeat(64)),
      errors.ManifestError,
      /cannot hold its own digest/,
    ],
    [
      "a file not there",
      (m) => void (program(m).file = "other.onnx"),
      errors.ManifestError,
      /not among the bundle's files/,
    ],
    [
      "a name of Object's",
      (m) => void (program(m).file = "constructor"),
      errors.ManifestError,
      /not among the bundle's files/,
    ],
    ["no outputs", (m) => void (m.programs.predict.outputs = []), errors.ManifestError, /no outputs/],
    ["steps 0", (m) => void (program(m).steps = 0), errors.ManifestError, /steps must be 1, or more/],
    ["steps of predict", (m) => void (m.programs.predict.steps = 2), errors.ManifestError, /more in a train program/],
    [
      "several steps of nothing",
      (m) => void delete m.programs.several.repeats,
      errors.ManifestError,
      /names the one that it repeats/,
    ],
    [
      "repeats nothing",
      (m) => void (m.programs.several.repeats = "none"),
      errors.ManifestError,
      /not a train program of 1 step/,
    ],
    [
      "repeats something else",
      (m) => void (m.programs.several.inputs[0].shape[2] = 13),
      errors.ManifestError,
      /are not those of "train", 4 times/,
    ],
    [
      "another number of steps",
      (m) => void (m.programs.several.steps = 3),
      errors.ManifestError,
      /first axis must be|must have shape/,
    ],
    [
      "two inputs of a name",
      (m) => void (program(m).inputs[1].name = program(m).inputs[0].name),
      errors.ManifestError,
      /two inputs have the same name/,
    ],
    ["a parameter twice", (m) => void m.parameters.push(m.parameters[0]), errors.ManifestError, /listed twice/],
    [
      "an unknown parameter",
      (m) => void m.parameters.shift(),
      errors.ManifestError,
      /not one of the bundle's parameters/,
    ],
    ["a parameter of another shape", (m) => void (m.parameters[0].shape = [3]), errors.ManifestError, /but parameter/],
    ["a huge parameter", (m) => void (m.parameters[0].shape = [2 ** 31, 2]), errors.TensorLayoutError, /2 GiB/],
    ["a negative dimension", (m) => void (m.parameters[0].shape = [-1]), errors.TensorLayoutError, /dimension -1/],
    ["rank 9", (m) => void (m.parameters[0].shape = Array(9).fill(1)), errors.TensorLayoutError, /rank 9/],
    [
      "a default beyond its bounds",
      (m) => {
        program(m).inputs.find((p: any) => p.role === "hyperparameter").default = 1e9;
      },
      errors.ManifestError,
      /minimum <= default <= maximum/,
    ],
    [
      "a state declared in two ways",
      (m) => {
        program(m).outputs.find((p: any) => p.role === "state").lifetime = "device";
      },
      errors.ManifestError,
      /not those of|declared differently/,
    ],
    [
      "an update without range",
      (m) => void (m.programs.finish.outputs[0].range = 0),
      errors.ManifestError,
      /range must be above 0/,
    ],
    [
      "an update of 31 bits",
      (m) => void (m.programs.finish.outputs[0].bits = 31),
      errors.ManifestError,
      /bits must be from 2 to 30/,
    ],
    [
      "a phase of predict",
      (m) => void (m.schedule[0].program = "predict"),
      errors.ManifestError,
      /not a train program/,
    ],
    [
      "a phase of several steps",
      (m) => void (m.schedule[0].program = "several"),
      errors.ManifestError,
      /makes 4 steps; name "train"/,
    ],
    ["a phase without end", (m) => void delete m.schedule[0].epochs, errors.ManifestError, /either epochs or steps/],
    ["a phase of 0 epochs", (m) => void (m.schedule[0].epochs = 0), errors.ManifestError, /at least 1/],
    [
      "a phase that moves nothing known",
      (m) => void (m.schedule[0].moves = ["x"]),
      errors.ManifestError,
      /does not write/,
    ],
    ["negative limits", (m) => void (m.limits.peak_bytes = -1), errors.ManifestError, /not be negative/],
    ["a self-test without a file", (m) => void (m.self_test.file = "x"), errors.ManifestError, /self_test: its file/],
    ["a negative tolerance", (m) => void (m.self_test.rtol = -1), errors.ManifestError, /rtol and atol/],
    ["no modes", (m) => void (m.privacy.modes = []), errors.ManifestError, /modes must name/],
    [
      "an unknown mode",
      (m) => void (m.privacy.modes = ["open"]),
      errors.ManifestError,
      /expected one of secure, plain/,
    ],
    ["noise below 0", (m) => void (m.privacy.noise_multiplier = -1), errors.ManifestError, /noise_multiplier must be/],
    [
      "sites that are too small",
      (m) => void (m.privacy.aggregators = { min_site_cohort: m.privacy.min_cohort - 1, max_site_cohort: 50 }),
      errors.ManifestError,
      /aggregators: min_site_cohort \d+ must be from min_cohort/,
    ],
    [
      "sites of half a threshold",
      (m) => void (m.privacy.aggregators = { min_site_cohort: 40, max_site_cohort: 50, threshold: 0.5 }),
      errors.ManifestError,
      /aggregators: min_cohort must be at least 2, threshold above 0.5/,
    ],
    [
      "too deep a tree",
      (m) => void (m.privacy.aggregators = { min_site_cohort: 40, max_site_cohort: 50, levels: 4 }),
      errors.ManifestError,
      /aggregators: levels must be from 1 to 3, is 4/,
    ],
    ["everybody colludes", (m) => void (m.privacy.colluders = 1), errors.ManifestError, /colluders must be a share/],
    ["too many queries", (m) => void (m.privacy.queries = 257), errors.ManifestError, /queries from 1 to 256/],
    ["no contributors", (m) => void (m.privacy.min_contributors = 0), errors.ManifestError, /at least 1/],
    ["a threshold of one half", (m) => void (m.privacy.threshold = 0.5), errors.ManifestError, /threshold above 0.5/],
    ["a lineage that is none", (m) => void (m.lineage.parent = "me"), errors.ManifestError, /lineage.parent/],
    ["a sequence below 0", (m) => void (m.sequence = -1), errors.ManifestError, /sequence and not_after must be from 0/],
    ["an end before 1970", (m) => void (m.not_after = -1), errors.ManifestError, /sequence and not_after must be from 0/],
    ["no end, spelt out", (m) => void (m.not_after = 0), errors.ManifestError, /not canonical/],
    ["a source that is not there", (m) => void (m.source = "s.onnx"), errors.ManifestError, /source "s.onnx" is not among/],
    ["populations that are unsorted", (m) => void (m.populations = ["b", "a"]), errors.ManifestError, /once and sorted/],
    ["a population twice", (m) => void (m.populations = ["a", "a"]), errors.ManifestError, /once and sorted/],
    ["a population that is no name", (m) => void (m.populations = ["a b"]), errors.ManifestError, /not a plain name/],
    [
      "too many populations",
      (m) => void (m.populations = Array.from({ length: 65 }, (_, index) => `p${100 + index}`)),
      errors.ManifestError,
      /at most 64 names/,
    ],
  ])("with %s", async (_, change, kind, message) => {
    const error = await refusal(await withManifest(bundle, change));
    expect(error.constructor).toBe(kind);
    expect(error.message).toMatch(message);
  });

  test("with a feature that nobody makes, and one of another shape", async () => {
    const { bundle: other } = fixture("features");
    const without = await withManifest(other, (m) => void delete m.programs.features);
    expect((await refusal(without)).message).toMatch(/no features program makes "z"/);
    const wider = await withManifest(other, (m) => void (m.programs.features.outputs[0].shape[1] = 5));
    expect((await refusal(wider)).message).toMatch(/the features program makes float32\[n,5\]/);
  });

  test("with a prediction whose free axis has another name, or a size", async () => {
    for (const dim of ["rows", 7]) {
      const other = await withManifest(bundle, (m) => void (prediction(m).shape[0] = dim));
      expect((await openBundle(other, KEYS)).manifest.programs.evaluate?.inputs[0]?.shape).toEqual([dim, 4]);
    }
  });

  test("the unchanged text goes through", async () => {
    expect(Buffer.from(canonical)).toEqual(
      Buffer.from(filesOf(await withManifest(bundle, () => undefined)).get("manifest.json") as Uint8Array),
    );
    expect(decodeManifest(Buffer.from(canonical)).name).toBe("mlp");
  });

  test("bounds of rounds among edge servers, in which no page takes part", async () => {
    const sites = { min_site_cohort: 40, max_site_cohort: 50, threshold: 0.75 };
    const changed = await withManifest(bundle, (m) => void (m.privacy.aggregators = sites));
    const { manifest } = await openBundle(changed, KEYS);
    expect(manifest.privacy.aggregators).toEqual({ ...sites, min_cohort: 2, colluders: 0, levels: 1 });
  });

  test("until when, for whom and instead of what it is", async () => {
    const said = { sequence: 3, not_after: 1893456000, populations: ["pupils", "staff"] };
    const opened = await openBundle(await withManifest(bundle, (m) => void Object.assign(m, said)), KEYS);
    expect(opened.manifest).toMatchObject(said);
    expect(decodeManifest(Buffer.from(canonical))).toMatchObject({ sequence: 0, not_after: 0, populations: [] });
  });

  // What the Python package says of each: tests/make_vectors.py.
  const { defaults } = JSON.parse(
    readFileSync(new URL("vectors/canonical.json", import.meta.url), "utf8"),
  ) as { defaults: { field: string; spelling: string; taken: boolean }[] };
  test.each(defaults)("the policy's default of $field spelt out: taken $taken", ({ field, spelling, taken }) => {
    const [before, privacy, after] = canonical.split(/(?<="privacy":)(\{[^}]*\})/) as [string, string, string];
    const fields = new Map(Object.entries(JSON.parse(privacy)).map(([name]) => [name, spellingOf(privacy, name)]));
    fields.set(field, spelling);
    const sorted = [...fields].sort(([one], [other]) => (one < other ? -1 : 1));
    const spelt = `${before}{${sorted.map(([name, value]) => `"${name}":${value}`).join(",")}}${after}`;
    const decoding = (): unknown => decodeManifest(Buffer.from(spelt));
    if (taken) expect(decoding).not.toThrow();
    else expect(decoding).toThrow(/not canonical/);
  });

  test("more than 4 MiB", () => {
    expect(() => decodeManifest(new Uint8Array(MAX_MANIFEST_BYTES + 1))).toThrow(/the limit is 4194304/);
  });
});
