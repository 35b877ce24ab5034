"""ONNX to LiteRT, float and int8, for the operators of the benchmark's networks. Runs where TensorFlow is.

    python convert_litert.py MODEL.onnx CALIBRATION.npy FLOAT.tflite INT8.tflite

Channels come last, as LiteRT's kernels want them, weights are transposed here and not when it runs. The input is
float32 [1, ..., channels] and the output float32 also in int8, as in this project's bundles.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import tensorflow as tf
from onnx import helper, numpy_helper


class Translation:
    """Calls TensorFlow operators for an ONNX graph's nodes, in order. One spatial axis is done as two, height 1."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        self._graph = graph
        self._constants = {each.name: numpy_helper.to_array(each) for each in graph.initializer}
        self._channels_first: dict[str, tuple[int, ...]] = {}
        """Shapes of activations before they were flattened, for the weights behind."""
        declared = graph.input[0].type.tensor_type.shape.dim
        self.input_shape = tuple(dim.dim_value for dim in declared)

    def __call__(self, x: Any) -> Any:
        values = {self._graph.input[0].name: self._spatial(x)}
        for node in self._graph.node:
            attributes = {each.name: helper.get_attribute_value(each) for each in node.attribute}
            emit: Callable[..., Any] = getattr(self, node.op_type.lower())
            values[node.output[0]] = emit(node, values, **attributes)
        return values[self._graph.output[0].name]

    def _spatial(self, x: Any) -> Any:
        return tf.expand_dims(x, 1) if len(self.input_shape) == 3 else x

    def conv(self, node: Any, values: Any, pads: list[int], strides: list[int], group: int = 1, **_: Any) -> Any:
        x, weight = values[node.input[0]], self._constants[node.input[1]]
        if weight.ndim == 3:
            weight, strides, pads = weight[:, :, None], [1, *strides], [0, pads[0], 0, pads[1]]
        half = len(pads) // 2
        same = self._is_same(x, weight.shape[2:], strides, pads)
        if any(pads) and not same:
            x = tf.pad(x, [[0, 0], [pads[0], pads[half]], [pads[1], pads[half + 1]], [0, 0]])
        padding = "SAME" if same else "VALID"
        if group == 1:
            y = tf.nn.conv2d(x, weight.transpose(2, 3, 1, 0), strides, padding)
        else:
            y = tf.nn.depthwise_conv2d(x, weight.transpose(2, 3, 0, 1), [1, *strides, 1], padding)
        return y + self._constants[node.input[2]] if len(node.input) > 2 else y

    @staticmethod
    def _is_same(x: Any, kernel: tuple[int, ...], strides: list[int], pads: list[int]) -> bool:
        """Whether these paddings are what TensorFlow calls SAME: then no Pad is needed before."""
        for axis in range(2):
            size = x.shape[1 + axis]
            total = max((-(-size // strides[axis]) - 1) * strides[axis] + kernel[axis] - size, 0)
            if (pads[axis], pads[axis + 2]) != (total // 2, total - total // 2):
                return False
        return True

    def relu(self, node: Any, values: Any) -> Any:
        return tf.nn.relu(values[node.input[0]])

    def clip(self, node: Any, values: Any) -> Any:
        low, high = (float(self._constants[name]) for name in node.input[1:3])
        if (low, high) != (0, 6):
            raise ValueError(f"a Clip from {low} to {high}; TensorFlow Lite has one from 0 to 6")
        return tf.nn.relu6(values[node.input[0]])

    def add(self, node: Any, values: Any) -> Any:
        return values[node.input[0]] + values[node.input[1]]

    def maxpool(self, node: Any, values: Any, kernel_shape: list[int], strides: list[int], **_: Any) -> Any:
        if len(kernel_shape) == 1:
            kernel_shape, strides = [1, *kernel_shape], [1, *strides]
        return tf.nn.max_pool2d(values[node.input[0]], kernel_shape, strides, "VALID")

    def globalaveragepool(self, node: Any, values: Any) -> Any:
        return tf.reduce_mean(values[node.input[0]], axis=[1, 2], keepdims=True)

    def reshape(self, node: Any, values: Any, **_: Any) -> Any:
        x = values[node.input[0]]
        if len(x.shape) == 4:
            self._channels_first[node.output[0]] = (x.shape[3], x.shape[1], x.shape[2])
        return tf.reshape(x, [1, -1])

    def gemm(self, node: Any, values: Any, transB: int = 0, **_: Any) -> Any:
        weight = self._constants[node.input[1]]
        weight = weight.T if transB else weight
        before = self._channels_first.get(node.input[0])
        if before is not None:
            # Its rows are numbered channels first, the flattened activations come channels last.
            weight = weight.reshape(*before, -1).transpose(1, 2, 0, 3).reshape(weight.shape)
        return tf.matmul(values[node.input[0]], weight) + self._constants[node.input[2]]


def converters(graph: onnx.GraphProto, calibration: Path) -> tuple[Any, Any]:
    """The converters to float and to int8."""
    translation = Translation(graph)
    first, channels, *rest = translation.input_shape
    function = tf.function(translation, input_signature=[tf.TensorSpec((first, *rest, channels), tf.float32)])
    concrete = function.get_concrete_function()

    def examples() -> Iterator[list[np.ndarray]]:
        for x in np.load(calibration):
            yield [np.ascontiguousarray(np.moveaxis(x[None], 1, -1))]

    exact, rounded = (tf.lite.TFLiteConverter.from_concrete_functions([concrete], function) for _ in range(2))
    rounded.optimizations = [tf.lite.Optimize.DEFAULT]
    rounded.representative_dataset = examples
    rounded.target_spec.supported_ops = [tf.lite.OpsSet.TFLITE_BUILTINS_INT8]
    return exact, rounded


def main(model: Path, calibration: Path, float_path: Path, int8_path: Path) -> None:
    exact, rounded = converters(onnx.load(model).graph, calibration)
    float_path.write_bytes(exact.convert())
    int8_path.write_bytes(rounded.convert())


def prefixes(model: Path, calibration: Path, folder: Path) -> None:
    """The network up to its first layer with weights or pooling, its second, ...: float-0.tflite, int8-0.tflite, on."""
    graph = onnx.load(model).graph
    consumers = {name: node for node in graph.node for name in node.input}
    names = []
    for node in graph.node:
        if node.op_type in ("Relu", "Clip", "Reshape", "Add"):
            continue
        end = node
        # With the activation behind it, which is done in the same kernel.
        while (after := consumers.get(end.output[0])) is not None and after.op_type in ("Relu", "Clip"):
            end = after
        part = onnx.GraphProto()
        part.CopyFrom(graph)
        part.output[0].name = end.output[0]
        needed, kept = {end.output[0]}, []
        for each in reversed(graph.node):
            if each.output[0] in needed:
                kept.insert(0, each)
                needed.update(each.input)
        del part.node[:]
        part.node.extend(kept)
        exact, rounded = converters(part, calibration)
        (folder / f"float-{len(names)}.tflite").write_bytes(exact.convert())
        (folder / f"int8-{len(names)}.tflite").write_bytes(rounded.convert())
        names.append(f"{node.op_type} {node.name}")
    (folder / "names.json").write_text(json.dumps(names))


if __name__ == "__main__":
    if sys.argv[1] == "--prefixes":
        prefixes(*map(Path, sys.argv[2:]))
    else:
        main(*map(Path, sys.argv[1:]))
