from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from archipel import bundle as b
from archipel.bundle.roles import Example, Hyperparameter, Label, Metric, Output, Parameter, Start, Update


@pytest.fixture
def key() -> Ed25519PrivateKey:
    return b.generate_key()


@pytest.fixture
def tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "fc.weight": rng.standard_normal((3, 4)).astype(np.float32),
        "fc.bias": np.zeros(3, np.float32),
        "scale": np.array(0.5, np.float64),
        "fc.weight_quantized": rng.integers(-128, 128, (3, 4)).astype(np.int8),
    }


def empty_graph(name: str) -> bytes:
    """A ModelProto of IR version 10 and opset 21; its graph has a name and no nodes."""
    graph = bytes([0x12, len(name)]) + name.encode()
    return bytes([0x08, 10, 0x3A, len(graph)]) + graph + bytes([0x42, 2, 0x10, 21])


def linear_parts(tensors: dict[str, np.ndarray]) -> dict[str, Any]:
    """What write_bundle wants for a linear classifier; the graphs have a name and no nodes."""
    x = Example(name="x", dtype="float32", shape=("batch", 4))
    label = Label(name="label", dtype="int64", shape=("batch",))
    specs = b.parameter_specs(tensors, ["fc.weight", "fc.bias"])
    ins = [Parameter(name=s.name, tensor=s.name, dtype=s.dtype, shape=s.shape) for s in specs]
    outs = [Parameter(name=f"{s.name}.next", tensor=s.name, dtype=s.dtype, shape=s.shape) for s in specs]
    starts = [Start(name=f"{s.name}.start", tensor=s.name, dtype=s.dtype, shape=s.shape) for s in specs]
    lr = Hyperparameter(name="lr", dtype="float32", shape=(), default=0.1, minimum=0.0, maximum=1.0)
    updates = [
        Update(
            name=f"{s.name}.update", tensor=s.name, dtype="float32", shape=s.shape, kind="delta",
            weighting="uniform", range=1.0, bits=16, clip=1.0,
        )
        for s in specs
    ]  # fmt: skip
    loss = Metric(name="loss", dtype="float32", shape=(), reduction="mean")
    programs = {
        "predict": b.Program(
            kind="predict",
            file="predict.onnx",
            inputs=(x,),
            outputs=(Output(name="y", dtype="float32", shape=("batch", 3)),),
        ),
        "train": b.Program(
            kind="train", file="train.onnx", inputs=(x, label, *ins, lr), outputs=(*outs, loss)
        ),
        "finish": b.Program(
            kind="finish", file="finish.onnx", inputs=(*starts, *ins), outputs=tuple(updates)
        ),
    }  # fmt: skip
    return {
        "name": "linear",
        "programs": programs,
        "graphs": {p.file: empty_graph(name) for name, p in programs.items()},
        "weights": b.write_weights(tensors),
        "parameters": specs,
        "limits": b.Limits(peak_bytes=1000, flops_per_example=24, upload_bytes=45),
        "privacy": b.PrivacyPolicy(modes=("secure",), min_cohort=3, threshold=0.6, max_clip=1.0, max_bits=16),
        "schedule": (b.Phase(program="train", epochs=1, batch_size=8),),
        "strategy": "fedavg",
    }


@pytest.fixture
def folder(tmp_path: Path, tensors: dict[str, np.ndarray], key: Ed25519PrivateKey) -> Path:
    b.write_bundle(tmp_path / "linear", key=key, **linear_parts(tensors))
    return tmp_path / "linear"


@pytest.fixture
def parts(tensors: dict[str, np.ndarray]) -> dict[str, Any]:
    return linear_parts(tensors)
