"""The files and names that the examples in docstrings take for granted: a small model, data, keys and a bundle."""

from __future__ import annotations

import copy
import os
import re
import signal
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pyarrow as pa
import pyarrow.parquet as pq
import safetensors.torch
import torch
from onnx import TensorProto, helper, numpy_helper

import archipel
from archipel import bundle, converter, lite_runtime, training
from archipel.compression import StaticInt8
from archipel.training import cloud


class Classifier(torch.nn.Module):
    """Rows of four numbers to three classes, with layers of the names that examples have."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = torch.nn.Linear(4, 8), torch.nn.Linear(8, 3)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.encoder(input)))  # type: ignore[no-any-return]


def affine() -> archipel.Model:
    """One layer, whose parameters are fc.weight and fc.bias."""
    module = torch.nn.Sequential(OrderedDict(fc=torch.nn.Linear(4, 3)))
    return archipel.Model.from_torch(module, torch.zeros(2, 4))


def numbers(examples: int = 600) -> tuple[np.ndarray, np.ndarray]:
    """float32 [examples, 4] around three centres, and their classes."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, examples)
    return (rng.normal(0, 1, (3, 4))[y] + 0.3 * rng.normal(0, 1, (examples, 4))).astype(np.float32), y


def graph_with_names(folder: Path) -> archipel.Model:
    """A model whose values are named as those in the examples of `autodiff`."""
    node, rng = helper.make_node, np.random.default_rng(0)
    weights = {"first": (4, 6), "fc.weight": (6, 3), "fc.bias": (3,)}
    made = [numpy_helper.from_array(rng.normal(0, 1, of).astype(np.float32), name) for name, of in weights.items()]
    nodes = [
        node("MatMul", ["input", "first"], ["hidden"]), node("Tanh", ["hidden"], ["encoder.output"]),
        node("Round", ["encoder.output"], ["rounded"]), node("Add", ["encoder.output", "rounded"], ["both"]),
        node("MatMul", ["both", "fc.weight"], ["product"]), node("Add", ["product", "fc.bias"], ["output"]),
        node("Mul", ["output", "output"], ["square"]), node("ReduceSum", ["square"], ["loss"], keepdims=0),
    ]  # fmt: skip
    value = helper.make_tensor_value_info
    outputs = [value("output", TensorProto.FLOAT, ["batch", 3]), value("loss", TensorProto.FLOAT, [])]
    graph = helper.make_graph(nodes, "named", [value("input", TensorProto.FLOAT, ["batch", 4])], outputs, made)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.save(model, folder / "named.onnx")
    return archipel.Model.from_onnx(folder / "named.onnx")


FEDERATION = """
rounds = 5
cohort = 4
model = { onnx = "model.onnx" }
data = { train = "people.npz", hold_out = 0.2 }
partition = { how = "iid", clients = 8 }
training = { optimizer = { name = "sgd", lr = 0.1 } }

[tune]
trials = 2
lr = { low = 0.05, high = 0.2 }
"""
CARD = """
name = "digits"
description = "Digits on small pictures."
task = "image classification"
"""
PREPROCESS = """
[[preprocess]]
kind = "raw"
dtype = "uint8"
shape = ["batch", 28, 28, 1]

[[preprocess]]
kind = "scale"
"""
RECIPE = """
[[part]]
kind = "static_int8"
"""


def make_world(folder: Path) -> Callable[[str, str], dict[str, Any]]:
    """Write the files into `folder`. What is returned gives the names that an example of a room, its code, finds."""
    torch.manual_seed(0)
    x, y = numbers()
    network, key, trained = Classifier(), bundle.generate_key(), training.optimizers.sgd(lr=0.05)
    bundle.save_private_key(key, folder / "publisher")
    bundle.save_public_key(key, folder / "publisher.pub")
    (folder / "device").mkdir()
    model = archipel.Model.from_torch(network, torch.zeros(2, 4))
    for name in ("model.onnx", "lenet.onnx"):
        model.save(folder / name)
    policy = bundle.PrivacyPolicy(
        modes=("secure",), min_cohort=2, threshold=0.6, max_clip=10.0, max_bits=24, colluders=0.0
    )
    learning = converter.Training(training.losses.cross_entropy(), trained, epochs=1, batch_size=10)
    made = converter.convert(
        model, folder / "made" / "digits.bundle", training=learning, signing=converter.Signing(key), privacy=policy
    )
    converter.convert_variants(
        model, folder / "made" / "digits", signing=converter.Signing(key),
        variants={"float": None, "int8": converter.Compression([StaticInt8()], calibration=x)},
    )  # fmt: skip
    for name in ("task.safetensors", "task.st"):
        (folder / name).write_bytes(bundle.write_weights(made.parameters()))
    np.savez(folder / "people.npz", x=x, y=y)
    pq.write_table(pa.table({"input": list(x), "label": y}), folder / "train.parquet")
    for name, text in {
        "federation.toml": FEDERATION,
        "card.toml": CARD,
        "recipe.toml": RECIPE,
        "preprocess.toml": PREPROCESS,
    }.items():
        (folder / name).write_text(text)
    trusted = [key.public_key().public_bytes_raw()]

    def make_step() -> archipel.Model:
        return training.step_graph(affine(), training.losses.cross_entropy(), training.optimizers.sgd(lr=0.1))

    def names(room: str, code: str) -> dict[str, Any]:
        # What takes long is made for those examples alone that name it.
        dear: dict[str, Callable[[], Any]] = {
            "step": make_step,
            "runtime": lambda: lite_runtime.load(folder / "made" / "digits.bundle", trusted),
            "model": lambda: graph_with_names(folder) if room == "archipel.autodiff" else model,
            "module": lambda: cloud.TorchModule(model) if room == "archipel.training.cloud" else network,
        }
        return {name: make() for name, make in dear.items() if re.search(rf"\b{name}\b", code)} | {
            "np": np, "torch": torch, "Path": Path, "os": os, "signal": signal, "time": time,
            "safetensors": safetensors,
            "archipel": archipel, **{name: getattr(archipel, name) for name in archipel._ROOMS}, **_usual(),
            "x": x, "y": y, "x_val": x, "y_val": y, "images": x, "labels": y, "test_images": x, "test_labels": y,
            "data": (x, y), "batches": [(x[:10], y[:10])] * 3, "picture": x[0], "clients": [{"x": x, "y": y}] * 2,
            "network": copy.deepcopy(network), "old": made, "key": key,
            "keys": trusted, "trusted": trusted, "trusted_keys": trusted,
        }  # fmt: skip

    return names


def _usual() -> dict[str, Any]:
    """What examples name without their room, as programs import it."""
    rooms = (archipel.graph, bundle, archipel.compression, converter, training, lite_runtime, cloud)
    return {name: getattr(room, name) for room in rooms for name in room.__all__ if name not in archipel._ROOMS}
