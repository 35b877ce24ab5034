// Two engines behind the same calls, for benchmarks/browser.py: `await window.open(name, task)`, then `window.step(name)`
// and `window.predict(name)`, which give milliseconds, and `window.logits(name)`.

import * as tf from "@tensorflow/tfjs";
import { setWasmPaths } from "@tensorflow/tfjs-backend-wasm";
import { load } from "archipel-web";
import { networks } from "./networks.js";

const engines = {};

const floats = (text) => new Float32Array(Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer);

async function openArchipel({ bundle, key, x, dims, y, lr }) {
  const model = await load(bundle, { trustedKeys: [key], delegate: "wasm" });
  const input = { dtype: "float32", dims, data: floats(x) };
  const labels = { dtype: "int64", dims: [dims[0]], data: BigInt64Array.from(y, BigInt) };
  const fit = { x: input, y: labels, batchSize: dims[0], shuffle: false, hyperparameters: { lr } };
  return {
    // Many steps in one call: a page that trains asks for epochs, not for a step.
    train: async (steps) => (await model.fit({ ...fit, epochs: steps, seed: 0 })).losses.at(-1),
    predict: async () => (await model.predict(input)).data,
  };
}

async function openTensorFlow({ backend, network, weights, x, dims, y, lr }) {
  setWasmPaths("./wasm/");
  if (!(await tf.setBackend(backend))) throw new Error(`TensorFlow.js has no backend ${backend} here`);
  await tf.ready();
  const model = networks[network](tf);
  for (const layer of model.layers) {
    const given = weights[layer.name];
    if (given) layer.setWeights(given.map(({ data, shape }) => tf.tensor(floats(data), shape)));
  }
  model.compile({ optimizer: tf.train.momentum(lr, 0.9), loss: "categoricalCrossentropy" });
  // Pictures as TensorFlow.js has them: channels last.
  const input = tf.tidy(() => tf.transpose(tf.tensor(floats(x), dims), [0, 2, 3, 1]));
  const labels = tf.tidy(() => tf.oneHot(tf.tensor1d(y, "int32"), 10).toFloat());
  return {
    use: () => tf.setBackend(backend),
    train: async (steps) => {
      let loss;
      for (let step = 0; step < steps; step++) loss = await model.trainOnBatch(input, labels);
      return loss;
    },
    predict: async () => {
      const out = tf.tidy(() => model.predict(input));
      const data = await out.data();
      out.dispose();
      return data;
    },
  };
}

window.open_ = async (name, task) => {
  engines[name] = await (task.backend ? openTensorFlow(task) : openArchipel(task));
  return task.backend ? tf.getBackend() : "wasm";
};

window.answers = async (name) => {
  await engines[name].use?.();
  return Array.from(await engines[name].predict());
};

window.train = async (name, steps) => {
  await engines[name].use?.();
  const started = performance.now();
  const loss = await engines[name].train(steps);
  return { ms: (performance.now() - started) / steps, loss };
};

window.predict = async (name, times) => {
  await engines[name].use?.();
  const started = performance.now();
  for (let time = 0; time < times; time++) await engines[name].predict();
  return (performance.now() - started) / times;
};
