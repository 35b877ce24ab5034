// The networks of archipel.models as TensorFlow.js writes them. A layer has the name of the PyTorch module, with _ for a
// dot; each ends with softmax, whose loss TensorFlow.js can train.

function digitsCnn(tf) {
  const { conv2d, maxPooling2d, flatten, dense } = tf.layers;
  return tf.sequential({
    layers: [
      conv2d({ name: "conv1", inputShape: [28, 28, 1], filters: 8, kernelSize: 5, activation: "relu" }),
      maxPooling2d({ poolSize: 2 }),
      conv2d({ name: "conv2", filters: 16, kernelSize: 5, activation: "relu" }),
      maxPooling2d({ poolSize: 2 }),
      flatten(),
      dense({ name: "hidden", units: 64, activation: "relu" }),
      dense({ name: "output", units: 10, activation: "softmax" }),
    ],
  });
}

function resnet8(tf) {
  const { conv2d, batchNormalization, reLU, add, zeroPadding2d, globalAveragePooling2d, dense } = tf.layers;
  // PyTorch pads by one on each side, "same" with stride 2 on one side only.
  const conv = (name, filters, strides, x) =>
    conv2d({ name, filters, kernelSize: 3, strides, useBias: false }).apply(zeroPadding2d({ padding: 1 }).apply(x));
  const norm = (name, x) => batchNormalization({ name, momentum: 0.9, epsilon: 1e-5 }).apply(x);
  const relu = (x) => reLU().apply(x);
  const block = (name, filters, strides, x) => {
    let y = relu(norm(`${name}_norm1`, conv(`${name}_conv1`, filters, strides, x)));
    y = norm(`${name}_norm2`, conv(`${name}_conv2`, filters, 1, y));
    const short = strides === 1 ? x : conv2d({ name: `${name}_shortcut`, filters, kernelSize: 1, strides }).apply(x);
    return relu(add().apply([y, short]));
  };
  const inputs = tf.input({ shape: [32, 32, 3] });
  let x = relu(norm("norm", conv("conv", 16, 1, inputs)));
  x = block("block3", 64, 2, block("block2", 32, 2, block("block1", 16, 1, x)));
  const outputs = dense({ name: "output", units: 10, activation: "softmax" }).apply(globalAveragePooling2d({}).apply(x));
  return tf.model({ inputs, outputs });
}

export const networks = { "digits CNN": digitsCnn, "ResNet-8": resnet8 };
