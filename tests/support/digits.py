"""A small network for the shipped digits, and data as `compress` takes them."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from archipel.graph import Model


class Digits(NamedTuple):
    """A trained network, and data as `compress` takes them, in memory and in files."""

    model: Model
    train: dict[str, np.ndarray]
    validation: dict[str, np.ndarray]
    folder: Path


def untrained(seed: int = 0) -> Model:
    """Two convolutions and a layer of 10 classes, 4,586 parameters."""
    rng = np.random.default_rng(seed)
    shapes = {"c1.w": (8, 1, 5, 5), "c1.b": (8,), "c2.w": (16, 8, 3, 3), "c2.b": (16,), "f.w": (10, 256), "f.b": (10,)}
    weights = []
    for name, shape in shapes.items():
        fan_in = int(np.prod(shape[1:])) if len(shape) > 1 else 1
        value = rng.standard_normal(shape) * (np.sqrt(2 / fan_in) if len(shape) > 1 else 0)
        weights.append(numpy_helper.from_array(value.astype(np.float32), name))
    nodes = [
        helper.make_node("Conv", ["x", "c1.w", "c1.b"], ["h1"], name="c1", strides=[3, 3]),
        helper.make_node("Relu", ["h1"], ["a1"]),
        helper.make_node("Conv", ["a1", "c2.w", "c2.b"], ["h2"], name="c2", strides=[2, 2], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["h2"], ["a2"]),
        helper.make_node("Flatten", ["a2"], ["flat"]),
        helper.make_node("Gemm", ["flat", "f.w", "f.b"], ["y"], name="f", transB=1),
    ]
    graph = helper.make_graph(
        nodes, "digits",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 1, 28, 28])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 10])],
        weights,
    )  # fmt: skip
    return Model.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10))
