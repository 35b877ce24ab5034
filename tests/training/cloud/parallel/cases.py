"""The cases of the quick tests, and the graphs that processes read from a folder."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from archipel import Model
from tests.training.cloud.parallel.networks import batch, network

# One of each way, and each network.
SHORT = [
    "mlp-ddp",
    "transformer-fsdp",
    "cnn-pipeline",
    "cnn-auto-graph",
    "picture-tensor-graph",
]


def write_graphs(folder: Path, names: Iterable[str]) -> None:
    for name in names:
        Model.from_torch(network(name).eval(), batch(name)[0]).save(folder / f"{name}.onnx")
