/** The same bundle, data and seed as the Python runtime's (on ONNX Runtime) and PyTorch's: the same numbers. */

import { beforeAll, describe, expect, test } from "vitest";

import type { NdArray } from "../src/arrays.js";
import { NonFiniteLossError, RuntimeInputError, RuntimeLimitError } from "../src/errors.js";
import type { EpochProgress, History, Progress } from "../src/index.js";
import type { RuntimeCore } from "../src/runtime/runtime.js";
import { loadCore } from "../src/core.js";
import { BUILDS } from "../src/runtime/builds.js";
import { keyBytes } from "../src/source.js";
import { byteSource, examples, expectArrays, expectClose, type Fixture, fixture, type FixtureName } from "./fixture.js";
import { withoutProgram } from "./forge.js";

const NAMES: FixtureName[] = ["cnn", "mlp", "norm", "quantized", "personal", "features"];

describe.each(NAMES)("%s", (name) => {
  const given: Fixture = fixture(name);
  const seen: Progress[] = [];
  const epochs: EpochProgress[] = [];
  let rt: RuntimeCore;
  let before: Record<string, NdArray>;
  let history: History;

  beforeAll(async () => {
    rt = await given.load();
    before = await rt.predict(examples(rt, given.fit.x));
    history = await rt.fit({
      ...given.fit,
      onStep: (progress) => void seen.push(progress),
      onEpoch: (progress) => void epochs.push(progress),
    });
    return () => rt.close();
  });

  test("predicts as published", () => {
    expect(rt.delegate).toBe("wasm");
    expectArrays(before, given.group("before"), 1e-4, 1e-5);
  });

  test("learns like Python and PyTorch for 50 steps", async () => {
    expect(history.losses).toHaveLength(50);
    expect(history.losses.at(-1)).toBeLessThan((history.losses[0] as number) / 2);
    expectClose(history.losses, given.numbers.losses);
    if (given.numbers.torch !== undefined) expectClose(history.losses, given.numbers.torch);
    expect([history.steps, history.examples, history.stopped]).toEqual([50, given.numbers.examples, false]);
    expect(seen.map(({ step }) => step)).toEqual(Array.from({ length: 50 }, (_, step) => step));
    expect(seen.map(({ loss }) => loss)).toEqual(history.losses);
    expect(epochs.map(({ epoch }) => epoch)).toEqual(Array.from({ length: given.fit.epochs }, (_, epoch) => epoch));
    expectArrays(await rt.parameters(), given.group("parameter"), 1e-3, 1e-5);
  });

  test("predicts with what it has learned", async () => {
    expectArrays(await rt.predict(examples(rt, given.fit.x)), given.group("after"), 1e-3, 1e-4);
  });

  test("measures what it predicts", async () => {
    const found = await rt.evaluate({ x: given.fit.x, batchSize: 16 });
    const { evaluate } = given.numbers;
    expect(Object.keys(found)).toEqual(Object.keys(evaluate));
    expectClose(Object.values(found), Object.values(evaluate), 1e-3);
    const answers = await rt.predict(examples(rt, given.fit.x));
    const measured = measure(answers, given.fit.x);
    expectClose(
      Object.keys(found).map((metric) => measured[metric] as number),
      Object.values(found),
      1e-4,
    );
  });

  test("takes part in rounds, the second with the state that the first one left", async () => {
    const fresh = await given.load();
    const before = await fresh.parameters();
    for (const number of [0, 1] as const) {
      const options = { ...given.numbers.round, x: given.fit.x, broadcast: given.fit.broadcast };
      const update = await fresh.localRound(options, byteSource(`round ${number}`));
      const expected = given.numbers[`round${number}`];
      expectArrays(update.arrays, given.group(`update${number}`), 1e-3, 1e-5);
      expectClose(update.losses, expected?.losses ?? []);
      expect([update.steps, update.examples]).toEqual([expected?.steps, expected?.examples]);
      expectClose(Object.values(update.metrics), Object.values(expected?.metrics ?? {}));
    }
    // A round does not change the model that takes part in it.
    expectArrays(await fresh.parameters(), before, 0, 0);
    fresh.close();
  });
});

test("several steps in one graph are the same steps", async () => {
  const given = fixture("mlp");
  const rt = await given.load();
  const { x, hyperparameters } = given.fit;
  // 60 examples in batches of 7: two groups of four and a last smaller one, in each pass.
  const options = { x, hyperparameters, epochs: 2, batchSize: 7, seed: 3 };
  const together = await rt.fit(options);
  const alone = await given.load();
  // Where not all tensors may move, the graph of several steps cannot be used.
  const names = Object.keys(await alone.parameters());
  const some = names.slice(0, 2);
  const one = await alone.fit({ ...options, moves: some });
  expect(together.losses).toHaveLength(18);
  expect(one.losses[0]).toBe(together.losses[0]);
  expect(one.losses[1]).not.toBe(together.losses[1]);
  const [moved, published] = [await alone.parameters(), await (await given.load()).parameters()];
  for (const name of names) {
    const same = Buffer.compare(bytes(moved[name]), bytes(published[name])) === 0;
    expect([name, same]).toEqual([name, !some.includes(name)]);
  }
});

test.each([0, 60, undefined])("features are the same with a memory limit of %d bytes beyond the need", async (more) => {
  const given = fixture("features");
  // 18 examples of 12 bytes: none kept, five kept, all kept.
  const rt = await given.load(more === undefined ? {} : { memoryLimit: 10_000 + more });
  const history = await rt.fit(given.fit);
  expectClose(history.losses, given.numbers.losses);
  const without = await given.load();
  expect((await without.fit({ ...given.fit, featureCache: false })).losses).toEqual(history.losses);
});

test("a bundle that needs more memory than it may is refused", async () => {
  await expect(fixture("features").load({ memoryLimit: 9_999 })).rejects.toThrow(RuntimeLimitError);
});

test("a loss that is not finite ends a fit, with the last weights that had one", async () => {
  const given = fixture("personal");
  const { x, broadcast, seed } = given.fit;
  const rt = await given.load();
  const bad = { ...x, y: { ...(x.y as NdArray), data: (x.y as NdArray).data.slice() as Float32Array } };
  bad.y.data[3] = Number.NaN;
  const seen: number[] = [];
  const options = { broadcast, seed, epochs: 5, batchSize: 5, onStep: ({ step }: Progress) => void seen.push(step) };
  await expect(rt.fit({ ...options, x: bad })).rejects.toThrow(NonFiniteLossError);
  const kept = await rt.parameters();
  // The same without the bad example's step, stopped one step before it: the loss of those weights was the last finite.
  const other = await given.load();
  const steps = seen.length;
  expect(steps).toBeGreaterThan(0);
  await other.fit({ ...options, x, onStep: ({ step }) => step === steps - 2 });
  expectArrays(kept, steps > 1 ? await other.parameters() : await (await given.load()).parameters(), 0, 0);
});

test.each([
  [13, 0],
  [0, 2],
  [7, 4],
  [10, 5],
  [12, 9],
])("example %d diverges at step %d, alone or within several steps in one graph", async (row, step) => {
  const given = fixture("mlp");
  const { input } = given.fit.x as { input: NdArray };
  const bad = { ...input, data: (input.data as Float32Array).slice() };
  bad.data[row * 12] = Number.NaN;
  const single = await withoutProgram(given.bundle, "several");
  const kept = [];
  for (const bundle of [given.bundle, single]) {
    const rt = await loadCore(bundle, { trustedKeys: keyBytes([given.numbers.publicKey]), delegate: "wasm" }, BUILDS);
    const options = { ...given.fit, x: { ...given.fit.x, input: bad } };
    const error: Error = await rt.fit(options).then(
      () => new Error("it went through"),
      (failure: Error) => failure,
    );
    expect(error).toBeInstanceOf(NonFiniteLossError);
    kept.push({ message: error.message, parameters: await rt.parameters() });
  }
  const [together, alone] = kept;
  expect(together?.message).toBe(alone?.message);
  expect(together?.message).toContain(`the loss is NaN at step ${step};`);
  expectArrays(together?.parameters ?? {}, alone?.parameters ?? {}, 1e-5);
});

test("a loss that is not finite decides nothing where noise is added", async () => {
  const given = fixture("private");
  const { input } = given.fit.x as { input: NdArray };
  const bad = { ...input, data: (input.data as Float32Array).slice() };
  bad.data[13 * 12] = Number.NaN;
  const rt = await given.load();
  const history = await rt.fit({ ...given.fit, x: { ...given.fit.x, input: bad } });
  expect(history.losses.filter(Number.isNaN)).toHaveLength(given.fit.epochs);
  expect(history.steps).toBe(50);
  for (const array of Object.values(await rt.parameters())) expect([...array.data].every(Number.isFinite)).toBe(true);
});

describe("stopping", () => {
  test("a callback that gives true, and cancel", async () => {
    const given = fixture("cnn");
    const rt = await given.load();
    const history = await rt.fit({ ...given.fit, onStep: ({ step }) => step === 4 });
    expect([history.steps, history.stopped]).toEqual([5, true]);
    expectClose(history.losses, given.numbers.losses.slice(0, 5));
    const cancelled = await rt.fit({ ...given.fit, onStep: ({ step }) => void (step === 2 && rt.cancel()) });
    expect([cancelled.steps, cancelled.stopped]).toEqual([3, true]);
    // What it has learned so far is kept, and the next fit is not cancelled.
    expect((await rt.fit({ ...given.fit, epochs: 1 })).stopped).toBe(false);
  });

  test("pause holds the steps until resume, and predict answers meanwhile", async () => {
    const given = fixture("cnn");
    const rt = await given.load();
    let steps = 0;
    const running = rt.fit({
      ...given.fit,
      onStep: ({ step }) => {
        steps = step + 1;
        if (step === 9) rt.pause();
      },
    });
    while (steps < 10) await sleep(5);
    await sleep(60);
    expect(steps).toBe(10);
    expectArrays(await rt.predict(examples(rt, given.fit.x)), given.group("before"), 1e-4, 1e-5);
    rt.resume();
    expectClose((await running).losses, given.numbers.losses);
  });

  test("a round that is cancelled leaves no trace", async () => {
    const given = fixture("personal");
    const rt = await given.load();
    const options = { ...given.numbers.round, x: given.fit.x, broadcast: given.fit.broadcast };
    await expect(rt.localRound({ ...options, onStep: () => true })).rejects.toThrow(/cancelled/);
    const update = await rt.localRound(options);
    expectArrays(update.arrays, given.group("update0"), 1e-3, 1e-5);
  });

  test("closing ends everything", async () => {
    const given = fixture("cnn");
    const rt = await given.load();
    const running = rt.fit({ ...given.fit, onStep: ({ step }) => void (step === 2 && rt.close()) });
    expect((await running).steps).toBe(3);
    await expect(rt.predict(examples(rt, given.fit.x))).rejects.toThrow(/closed/);
    await expect(rt.parameters()).rejects.toThrow(/closed/);
  });
});

test.each<FixtureName>(["mlp", "norm", "quantized", "personal", "features"])(
  "validation of %s is what evaluate gives after as many epochs, while predict answers as before",
  async (name) => {
    const given = fixture(name);
    const { x } = given.fit;
    const rt = await given.load();
    const first = await rt.predict(examples(rt, x));
    const seen: EpochProgress[] = [];
    const onEpoch = async (progress: EpochProgress): Promise<void> => {
      seen.push(progress);
      expectArrays(await rt.predict(examples(rt, x)), first, 0, 0);
    };
    const history = await rt.fit({ ...given.fit, epochs: 3, validation: { x }, onEpoch });
    expect(seen.map(({ validation }) => validation)).toEqual(history.validation);
    expect(new Set(history.validation.map((metrics) => JSON.stringify(metrics))).size).toBe(3);
    for (const [index, metrics] of history.validation.entries()) {
      const other = await given.load();
      await other.fit({ ...given.fit, epochs: index + 1 });
      expect(metrics).toEqual(await other.evaluate({ x }));
      other.close();
    }
    rt.close();
  },
);

test("of weights in 4 bits the loss is not that of the weights in float", async () => {
  const given = fixture("quantized");
  const rt = await given.load();
  await rt.setParameters(given.group("parameter"));
  const { loss } = await rt.evaluate({ x: given.fit.x });
  expectClose([loss as number], [given.numbers.evaluate.loss as number], 1e-3);
  const difference = Math.abs((loss as number) - (given.numbers.floatLoss as number));
  expect(difference).toBeGreaterThan(0.1 * (given.numbers.floatLoss as number));
});

describe("an evaluation", () => {
  test("needs its program, and the fields of predict and of evaluate", async () => {
    const given = fixture("features");
    const { x } = given.fit;
    const bare = await withoutProgram(given.bundle, "evaluate");
    const without = await loadCore(bare, { trustedKeys: keyBytes([given.numbers.publicKey]), delegate: "wasm" }, BUILDS);
    const begun: number[] = [];
    const onStep = ({ step }: { step: number }): void => void begun.push(step);
    await expect(without.fit({ ...given.fit, validation: { x }, onStep })).rejects.toThrow(/no evaluate program/);
    expect(begun).toEqual([]);
    await expect(without.evaluate({ x })).rejects.toThrow(/bundle features has no evaluate program/);
    const rt = await given.load();
    const { x: asked, y } = x as { x: NdArray; y: NdArray };
    await expect(rt.evaluate({ x: { y } })).rejects.toThrow(/evaluate: field 'x' \(float32\[n, 6\]\) is missing/);
    await expect(rt.evaluate({ x: asked })).rejects.toThrow(/evaluate: field 'y' \(float32\[4\]\) is missing/);
    expect(await rt.evaluate({ x: asked, y })).toEqual(await rt.evaluate({ x }));
  });

  test("in batches of any size is the same", async () => {
    const given = fixture("personal");
    const rt = await given.load();
    const whole = await rt.evaluate({ x: given.fit.x });
    for (const batchSize of [1, 5, 22]) {
      const found = await rt.evaluate({ x: given.fit.x, batchSize });
      expectClose(Object.values(found), Object.values(whole), 1e-5);
    }
    await expect(rt.evaluate({ x: given.fit.x, batchSize: 0 })).rejects.toThrow(/batch size must be at least 1, got 0/);
  });

  test("gives weight 0 to what fills up a batch of a fixed size", async () => {
    const given = fixture("features");
    const rt = await given.load();
    const { x, y } = given.fit.x as { x: NdArray; y: NdArray };
    // Two of four: the weights of those two are all that counts.
    const two = (array: NdArray, width: number): NdArray => ({
      ...array,
      dims: [2, ...array.dims.slice(1)],
      data: array.data.slice(0, 2 * width),
    });
    const k: NdArray = { dtype: "float32", dims: [2], data: Float32Array.of(1, 3) };
    const fields = { x: two(x, 6), y: two(y, 1), k };
    const { error } = await rt.evaluate({ x: fields });
    const answers = await rt.predict({ x: fields.x });
    expectClose([error as number], [measure(answers, fields).error as number], 1e-5);
  });
});

test("an array alone is the only field of its role", async () => {
  const given = fixture("mlp");
  const rt = await given.load();
  const { input, label } = given.fit.x as { input: NdArray; label: NdArray };
  const answer = await rt.predict(input);
  expectArrays({ output: answer }, given.group("before"), 1e-4, 1e-5);
  const history = await rt.fit({ ...given.fit, x: input, y: label });
  expectClose(history.losses, given.numbers.losses);
});

test("parameters are copies, and can be set and reset", async () => {
  const given = fixture("mlp");
  const rt = await given.load();
  const published = await rt.parameters();
  (await rt.parameters())["0.weight"]?.data.fill(7 as never);
  expectArrays(await rt.parameters(), published, 0, 0);
  await rt.setParameters(given.group("parameter"));
  expectArrays(await rt.predict(examples(rt, given.fit.x)), given.group("after"), 1e-3, 1e-4);
  await rt.reset("parameters");
  expectArrays(await rt.predict(examples(rt, given.fit.x)), given.group("before"), 1e-4, 1e-5);
});

test("personal tensors and state can be forgotten", async () => {
  const given = fixture("personal");
  const rt = await given.load();
  const options = { ...given.numbers.round, x: given.fit.x, broadcast: given.fit.broadcast };
  await rt.localRound(options);
  await rt.reset("personal");
  await rt.reset("state");
  expectArrays((await rt.localRound(options)).arrays, given.group("update0"), 1e-3, 1e-5);
  await expect(rt.reset("everything" as never)).rejects.toThrow(RuntimeInputError);
});

describe("arrays that do not fit", () => {
  const given = fixture("mlp");
  const { input, label } = given.fit.x as { input: NdArray; label: NdArray };
  const ints = { dtype: "int32", dims: [60], data: new Int32Array(60) };

  test.each<[what: string, x: unknown, message: RegExp]>([
    [
      "dtype",
      { input: { ...input, dtype: "float64", data: new Float64Array(720) }, label },
      /float32\[batch, 12\], got float64\[60, 12\]/,
    ],
    ["label dtype", { input, label: ints }, /'label' must be int64\[batch\], got int32\[60\]; convert it to int64/],
    ["rank", { input: { ...input, dims: [720] }, label }, /got float32\[720\]; add the batch axis/],
    ["width", { input: { ...input, dims: [90, 8] }, label }, /got float32\[90, 8\] \(axis 1 differs\)/],
    ["count", { input, label: { ...label, dims: [30], data: label.data.slice(0, 30) } }, /'label' has 30 examples/],
    ["missing field", { input }, /field 'label' \(int64\[batch\]\) is missing; given: input/],
    ["element count", { input: { ...input, dims: [61, 12] }, label }, /need 732 elements, the data has 720/],
    [
      "kind of data",
      { input: { ...input, data: new Float64Array(720) }, label },
      /needs a Float32Array, got Float64Array/,
    ],
    ["unknown dtype", { input: { ...input, dtype: "complex64" }, label }, /"complex64" is not one of/],
    ["no array", { input: [[1, 2, 3]], label }, /expected an array \{ dtype, dims, data \}, got Array/],
    ["null", { input: null, label }, /got null/],
    ["negative", { input: { ...input, dims: [-60, -12] }, label }, /dims \[-60,-12\]/],
    [
      "no examples",
      {
        input: { dtype: "float32", dims: [0, 12], data: new Float32Array() },
        label: { ...label, dims: [0], data: new BigInt64Array() },
      },
      /no examples/,
    ],
  ])("%s", async (_, x, message) => {
    const rt = await given.load();
    const failure = await rt.fit({ ...given.fit, x: x as never }).catch((error: unknown) => error);
    expect(failure).toBeInstanceOf(RuntimeInputError);
    expect((failure as Error).message).toMatch(message);
  });

  test.each<[what: string, options: object, message: RegExp]>([
    ["epochs", { epochs: 0 }, /epochs and batchSize must be at least 1, got 0/],
    ["half a batch", { batchSize: 1.5 }, /at least 1/],
    ["seed", { seed: -1 }, /seed must be a whole number from 0 to 4294967295, got -1/],
    ["hyperparameter name", { hyperparameters: { rate: 1 } }, /hyperparameter 'rate' is not one of this bundle's: lr/],
    ["hyperparameter value", { hyperparameters: { lr: -1 } }, /'lr' must be from 0 to 100, got -1/],
    ["moves", { moves: ["nothing"] }, /moves: nothing is not one that train writes/],
    ["program", { program: "predict" }, /predict is not a train program/],
    ["checkpoint pace", { checkpointEvery: -1 }, /checkpointEvery/],
  ])("%s", async (_, options, message) => {
    const rt = await given.load();
    const before = await rt.parameters();
    await expect(rt.fit({ ...given.fit, ...options })).rejects.toThrow(message);
    expectArrays(await rt.parameters(), before, 0, 0);
  });

  test("of a round and of predict", async () => {
    const personal = fixture("personal");
    const rt = await personal.load();
    const { x } = personal.fit;
    const { seed } = personal.numbers.round;
    await expect(rt.localRound({ x, seed })).rejects.toThrow(/broadcast 'c' \(float32\[3\]\) is missing.*Given: none/);
    const { broadcast } = personal.fit;
    await expect(rt.localRound({ x, seed, broadcast, parameters: {} })).rejects.toThrow(/parameters: w missing/);
    await expect(rt.predict({ x: x.x as NdArray, z: x.x as NdArray })).rejects.toThrow(/predict: z is not a field/);
    await expect(rt.predict({})).rejects.toThrow(/field 'x' \(float32\[n, 3\]\) is missing/);
    await expect(rt.setParameters({ v: x.x as NdArray })).rejects.toThrow(/parameter 'v' is not one of bundle/);
    await expect(rt.setParameters({ w: x.x as NdArray })).rejects.toThrow(/'w' must be float32\[3\], got float32\[22/);
  });

  test("a graph made for batches of one size", async () => {
    const rt = await fixture("features").load();
    await expect(rt.fit({ ...fixture("features").fit, batchSize: 5 })).rejects.toThrow(/made for batches of 4/);
  });
});

/** The metrics of the fixtures' bundles, written out: cross-entropy of logits, or the squared error. */
function measure(answers: Record<string, NdArray>, fields: Record<string, NdArray>): Record<string, number> {
  const [answer] = Object.values(answers) as [NdArray];
  const labels = Array.from((fields.label ?? fields.y)?.data as Float32Array, Number);
  if (fields.label === undefined) {
    const weights = fields.k?.data as Float32Array | undefined;
    let [worst, total] = [0, 0];
    labels.forEach((label, row) => {
      const weight = weights?.[row] ?? 1;
      worst += weight * ((answer.data[row] as number) - label) ** 2;
      total += weight;
    });
    return { worst, error: worst / total };
  }
  const width = answer.dims[1] as number;
  let [loss, correct] = [0, 0];
  labels.forEach((label, row) => {
    const logits = Array.from(answer.data.subarray(row * width, (row + 1) * width) as Float32Array);
    const chosen = logits[label] as number;
    loss += Math.log(logits.reduce((sum, logit) => sum + Math.exp(logit - chosen), 0));
    if (chosen === Math.max(...logits)) correct++;
  });
  return { loss, correct, count: labels.length };
}

function bytes(array: NdArray | undefined): Uint8Array {
  const { data } = array as NdArray;
  return new Uint8Array(data.buffer, data.byteOffset, data.byteLength);
}

function sleep(milliseconds: number): Promise<void> {
  return new Promise((resolve) => setTimeout(resolve, milliseconds));
}
