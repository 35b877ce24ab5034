"""Writes a training step for LiteRT: TensorFlow's gradients, variables inside the file, one signature `train`.

    python convert_step_litert.py FOLDER

FOLDER is of benchmarks/peers/train_steps.py; the file is FOLDER/train.tflite. TensorFlow's gradients of convolutions,
pooling and activations are operators of its own ("select operators"), which the wheels of LiteRT and TensorFlow do not
run: here they are written with LiteRT's operators.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from train_networks import NETWORKS, channels_last
from train_steps import Job


@tf.custom_gradient
def relu(x: Any) -> Any:
    y = tf.nn.relu(x)
    return y, lambda gradient: gradient * tf.cast(y > 0, y.dtype)


@tf.custom_gradient
def relu6(x: Any) -> Any:
    y = tf.nn.relu6(x)
    return y, lambda gradient: gradient * tf.cast(tf.logical_and(y > 0, y < 6), y.dtype)


@tf.custom_gradient
def max_pool(x: Any) -> Any:
    """Of what has just been through relu, which stops what equal values get too much of."""
    window = [1, 2 if x.shape[1] > 1 else 1, 2, 1]
    y = tf.nn.max_pool2d(x, window, window, "VALID")

    def back(gradient: Any) -> Any:
        there, spread = (tf.compat.v1.image.resize_nearest_neighbor(each, x.shape[1:3]) for each in (y, gradient))
        return spread * tf.cast(tf.equal(x, there), x.dtype)

    return y, back


def convolution(stride: int, depthwise: bool) -> Any:
    """A function of pictures, which are padded, and kernels [height, width, channels, filters]."""

    @tf.custom_gradient
    def convolve(x: Any, kernel: Any) -> Any:
        height, width, _, filters = kernel.shape
        if depthwise:
            y = tf.nn.depthwise_conv2d(x, tf.transpose(kernel, [0, 1, 3, 2]), [1, stride, stride, 1], "VALID")
        else:
            y = tf.nn.conv2d(x, kernel, stride, "VALID")
        rows, columns = y.shape[1:3]

        def back(gradient: Any) -> tuple[Any, Any]:
            windows = [
                x[:, i : i + stride * (rows - 1) + 1 : stride, j : j + stride * (columns - 1) + 1 : stride]
                for i in range(height) for j in range(width)
            ]  # fmt: skip
            if depthwise:
                if stride > 1:
                    # Zeros between the gradient's rows and columns.
                    sizes = [rows * stride, columns * stride]
                    spots = np.zeros([1, *sizes, 1], np.float32)
                    spots[:, ::stride, ::stride] = 1
                    gradient_apart = tf.compat.v1.image.resize_nearest_neighbor(gradient, sizes) * spots
                    gradient_apart = gradient_apart[:, : 1 - stride, : 1 - stride]
                else:
                    gradient_apart = gradient
                flipped = tf.transpose(tf.reverse(kernel, [0, 1]), [0, 1, 3, 2])
                after = [x.shape[1 + axis] - gradient_apart.shape[1 + axis] for axis in range(2)]
                around = [[0, 0], [height - 1, after[0]], [width - 1, after[1]], [0, 0]]
                past = tf.nn.depthwise_conv2d(tf.pad(gradient_apart, around), flipped, [1, 1, 1, 1], "VALID")
                sums = [tf.reduce_sum(window * gradient, [0, 1, 2]) for window in windows]
                return past, tf.reshape(tf.stack(sums), kernel.shape)
            past = tf.nn.conv2d_transpose(gradient, kernel, x.shape, stride, "VALID")
            unfolded = tf.reshape(tf.concat(windows, -1), [-1, height * width * x.shape[-1]])
            product = tf.matmul(unfolded, tf.reshape(gradient, [-1, filters]), transpose_a=True)
            return past, tf.reshape(product, kernel.shape)

        return y, back

    return convolve


def erf(x: Any) -> Any:
    """To 1.5e-7 (Abramowitz and Stegun 7.1.26): LiteRT has no such operator."""
    t = 1 / (1 + 0.3275911 * tf.abs(x))
    series = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    return tf.sign(x) * (1 - series * tf.exp(-x * x))


@tf.custom_gradient
def gelu(x: Any) -> Any:
    share = 0.5 * (1 + erf(x * 0.5**0.5))
    return x * share, lambda gradient: gradient * (share + x * tf.exp(-0.5 * x * x) * 0.3989422804014327)


class Layers:
    """Pictures are channels last, and have a height of one where the network's have one axis."""

    def __init__(self, parameters: dict[str, Any], running: dict[str, Any]) -> None:
        self.parameters, self.running = parameters, running

    def pictures(self, x: Any) -> Any:
        return tf.transpose(tf.expand_dims(x, 2) if len(x.shape) == 3 else x, [0, 2, 3, 1])

    def conv(self, x: Any, name: str, stride: int = 1, padding: Sequence[int] = (0, 0), groups: int = 1) -> Any:
        weight = tf.convert_to_tensor(self.parameters[f"{name}.weight"])
        if len(weight.shape) == 3:
            weight, padding = tf.expand_dims(weight, 0), (0, *padding)
        if any(padding):
            x = tf.pad(x, [[0, 0], *([each, each] for each in padding), [0, 0]])
        y = convolution(stride, groups > 1)(x, weight)
        bias = self.parameters.get(f"{name}.bias")
        return y if bias is None else y + bias

    def norm(self, x: Any, name: str) -> Any:
        axes = list(range(len(x.shape) - 1))
        mean, variance = tf.nn.moments(x, axes)
        count = x.shape.num_elements() // x.shape[-1]
        for key, value in (("mean", mean), ("var", variance * (count / (count - 1)))):
            running = self.running[f"{name}.running_{key}"]
            running.assign(0.9 * running + 0.1 * tf.stop_gradient(value))
        scale, shift = self.parameters[f"{name}.weight"], self.parameters[f"{name}.bias"]
        return tf.nn.batch_normalization(x, mean, variance, shift, scale, 1e-5)

    def max_pool(self, x: Any) -> Any:
        return max_pool(x)

    def mean(self, x: Any) -> Any:
        return tf.reduce_mean(x, list(range(1, len(x.shape) - 1)))

    def flatten(self, x: Any) -> Any:
        return tf.reshape(x, [x.shape[0], -1])

    def dense(self, x: Any, name: str) -> Any:
        weight = self.parameters[f"{name}.weight"]
        rows = tf.matmul(tf.reshape(x, [-1, x.shape[-1]]), weight) + self.parameters[f"{name}.bias"]
        return tf.reshape(rows, [*x.shape[:-1], weight.shape[1]])

    def relu(self, x: Any) -> Any:
        return relu(x)

    def relu6(self, x: Any) -> Any:
        return relu6(x)

    def gelu(self, x: Any) -> Any:
        return gelu(x)

    def add(self, x: Any, y: Any) -> Any:
        return x + y

    def embed(self, ids: Any, name: str) -> Any:
        return tf.gather(tf.convert_to_tensor(self.parameters[f"{name}.weight"]), ids)

    def parameter(self, name: str) -> Any:
        return tf.convert_to_tensor(self.parameters[name])

    def layer_norm(self, x: Any, name: str) -> Any:
        mean, variance = tf.nn.moments(x, [-1], keepdims=True)
        normal = (x - mean) * tf.math.rsqrt(variance + 1e-5)
        return normal * self.parameters[f"{name}.weight"] + self.parameters[f"{name}.bias"]

    def lstm(self, x: Any, name: str) -> Any:
        for layer in range(2):
            keys = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
            own = [tf.convert_to_tensor(self.parameters[f"{name}.{key}_l{layer}"]) for key in keys]
            rows = tf.tensordot(x, own[0], 1) + own[2] + own[3]
            h = c = tf.zeros([x.shape[0], own[1].shape[0]])
            states = []
            for row in tf.unstack(rows, axis=1):
                i, f, g, o = tf.split(row + h @ own[1], 4, -1)
                c = tf.sigmoid(f) * c + tf.sigmoid(i) * tf.tanh(g)
                h = tf.sigmoid(o) * tf.tanh(c)
                states.append(h)
            x = tf.stack(states, 1)
        return x

    def attention(self, x: Any, heads: int) -> Any:
        batch, time, width = x.shape
        shape = [batch, time, heads, width // 3 // heads]
        q, k, v = (tf.transpose(tf.reshape(part, shape), [0, 2, 1, 3]) for part in tf.split(x, 3, -1))
        later = tf.linalg.band_part(tf.ones([time, time]), -1, 0) * 1e9 - 1e9
        scores = tf.matmul(q, k, transpose_b=True) * shape[-1] ** -0.5 + later
        mixed = tf.matmul(tf.nn.softmax(scores), v)
        return tf.reshape(tf.transpose(mixed, [0, 2, 1, 3]), [batch, time, width // 3])


class Training(tf.Module):
    """A network with its values as variables; `train` makes a step of SGD with momentum."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.job, first = job, channels_last(job.network, job.weights)
        self.running = {
            name: tf.Variable(value, trainable=False) for name, value in first.items() if ".running_" in name
        }
        self.parameters = {name: tf.Variable(value) for name, value in first.items() if name not in self.running}
        self.momenta = {name: tf.Variable(tf.zeros_like(value)) for name, value in self.parameters.items()}

    def train(self, x: Any, y: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            logits = NETWORKS[self.job.network](Layers(self.parameters, self.running), x)
            logits = tf.reshape(logits, [-1, logits.shape[-1]])
            labels = tf.one_hot(tf.reshape(y, [-1]), logits.shape[-1])
            loss = -tf.reduce_mean(tf.reduce_sum(tf.nn.log_softmax(logits) * labels, -1))
        names = list(self.parameters)
        gradients = tape.gradient(loss, [self.parameters[name] for name in names])
        for name, gradient in zip(names, gradients):
            momentum = self.job.momentum * self.momenta[name] + tf.convert_to_tensor(gradient)
            self.momenta[name].assign(momentum)
            self.parameters[name].assign_sub(self.job.rate * momentum)
        return {"loss": loss}


def main() -> None:
    job = Job(Path(sys.argv[1]))
    model = Training(job)
    specs = [tf.TensorSpec(array.shape, array.dtype) for array in job.feeds[0].values()]
    train = tf.function(model.train).get_concrete_function(*specs)
    place = str(job.folder / "saved")
    tf.saved_model.save(model, place, signatures={"train": train})
    converter = tf.lite.TFLiteConverter.from_saved_model(place)
    converter.experimental_enable_resource_variables = True
    (job.folder / "train.tflite").write_bytes(converter.convert())


if __name__ == "__main__":
    main()
