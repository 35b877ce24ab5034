// Runs a train program in ONNX Runtime Web: node run_steps.mjs JOB.json, where the job is
// { graph, initial: {input: tensor}, feeds: [{input: tensor}], carried: {output: input}, metric } and a tensor is
// { type, dims, data: base64 }. Prints {"losses": [...], "milliseconds": [...]}, one of each for every feed.
import { readFileSync } from "node:fs";
import * as ort from "onnxruntime-web";

const ARRAYS = {
  float32: Float32Array,
  float64: Float64Array,
  int16: Int16Array,
  int32: Int32Array,
  int64: BigInt64Array,
  uint32: Uint32Array,
  uint8: Uint8Array,
  bool: Uint8Array,
};

function tensor({ type, dims, data }) {
  const bytes = Uint8Array.from(Buffer.from(data, "base64"));
  return new ort.Tensor(type, new ARRAYS[type](bytes.buffer), dims);
}

const tensors = (described) => Object.fromEntries(Object.entries(described).map(([name, t]) => [name, tensor(t)]));

const job = JSON.parse(readFileSync(process.argv[2], "utf8"));
ort.env.wasm.numThreads = 1;
ort.env.logLevel = "error";
const session = await ort.InferenceSession.create(new Uint8Array(readFileSync(job.graph)), {
  executionProviders: ["wasm"],
});
const current = tensors(job.initial);
const losses = [];
const milliseconds = [];
for (const feed of job.feeds) {
  const inputs = { ...current, ...tensors(feed) };
  const started = performance.now();
  const results = await session.run(inputs);
  milliseconds.push(performance.now() - started);
  losses.push(...Array.from(results[job.metric].data, Number));
  for (const [output, input] of Object.entries(job.carried)) current[input] = results[output];
}
console.log(JSON.stringify({ losses, milliseconds }));
