"""A bundle whose graphs have no nodes: the server runs none, and sums come out exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from archipel.bundle import (
    Limits,
    Lineage,
    ModelCard,
    Phase,
    PrivacyPolicy,
    Program,
    Statistic,
    pack,
    parameter_specs,
    write_bundle,
    write_weights,
)
from archipel.bundle.roles import Example, Hyperparameter, Metric, Output, Parameter, Prediction, Start, Update

# Chosen so that one step of the fixed-point encoding is a power of two, and sums come out exactly in float32.
DELTA_RANGE, DELTA_STEP = 32767 / 256, 1 / 256
WEIGHT_RANGE, WEIGHT_STEP = 32767 / 4096, 1 / 4096
LENGTH = 6 + 2 + 1
NO_NODES = b"\x08\x0a\x3a\x00\x42\x02\x10\x15"
"""A ModelProto of IR version 10 and opset 21 with an empty graph."""


def make_bundle(
    folder: Path,
    signer: Ed25519PrivateKey,
    *,
    name: str = "tiny",
    strategy: str = "fedavg",
    weighting: str = "examples",
    min_cohort: int = 3,
    lineage: Lineage | None = None,
    policy: dict[str, Any] | None = None,
    not_after: int = 0,
    card: ModelCard | None = None,
) -> Path:
    """A bundle with parameters w [3, 2] and b [2], all zero. Its graphs have no nodes: the server runs none."""
    path = name.replace("/", "-")
    tensors = {"w": np.zeros((3, 2), np.float32), "b": np.zeros(2, np.float32)}
    w: dict[str, Any] = {"dtype": "float32", "shape": (3, 2)}
    b: dict[str, Any] = {"dtype": "float32", "shape": (2,)}
    update: dict[str, Any] = {"kind": "delta", "weighting": weighting, "range": DELTA_RANGE, "bits": 16, "clip": 100.0}
    weight = Update(
        name="weight", tensor="weight", dtype="float32", shape=(),
        kind="weight", weighting="examples", range=WEIGHT_RANGE, bits=16, lowest=1 / 64,
    )  # fmt: skip
    finish = Program(
        kind="finish",
        file="finish.onnx",
        inputs=(
            Start(name="w.start", tensor="w", **w),
            Start(name="b.start", tensor="b", **b),
            Parameter(name="w", tensor="w", **w),
            Parameter(name="b", tensor="b", **b),
        ),
        outputs=(
            Update(name="w.update", tensor="w", **w, **update),
            Update(name="b.update", tensor="b", **b, **update),
            *([weight] if weighting == "examples" else []),
        ),
    )  # fmt: skip
    train = Program(
        kind="train",
        file="train.onnx",
        inputs=(
            Example(name="image", dtype="float32", shape=("batch", 3)),
            Parameter(name="w", tensor="w", **w),
            Parameter(name="b", tensor="b", **b),
            Hyperparameter(name="lr", dtype="float32", shape=(), default=0.1, minimum=0.0, maximum=1.0),
        ),
        outputs=(
            Parameter(name="w.new", tensor="w", **w),
            Parameter(name="b.new", tensor="b", **b),
        ),
    )
    data = (
        Example(name="image", dtype="float32", shape=("batch", 3)),
        Parameter(name="w", tensor="w", **w),
        Parameter(name="b", tensor="b", **b),
    )
    answer = Output(name="hours", dtype="float32", shape=("batch", 2))
    measured = Prediction(name="hours", dtype="float32", shape=("batch", 2), output="hours")
    metrics = (
        Metric(name="loss", dtype="float32", shape=(), reduction="mean"),
        Metric(name="accuracy", dtype="float32", shape=(), reduction="mean"),
    )
    counted: dict[str, Any] = {
        "kind": "value",
        "weighting": "uniform",
        "dtype": "float32",
        "range": 32767.0,
        "bits": 16,
    }
    sums = tuple(
        Update(name=tensor, tensor=tensor, shape=shape, **counted)
        for tensor, shape in (("light/sum", ()), ("light/count", ()), ("hours/histogram", (4,)))
    )
    programs = {
        "train": train,
        "finish": finish,
        "predict": Program(kind="predict", file="predict.onnx", inputs=data, outputs=(answer,)),
        "evaluate": Program(kind="evaluate", file="evaluate.onnx", inputs=(measured,), outputs=metrics),
        "look": Program(kind="analyze", file="look.onnx", inputs=data[:1], outputs=sums),
    }
    write_bundle(
        folder / path,
        name=name,
        programs=programs,
        graphs=dict.fromkeys((program.file for program in programs.values()), NO_NODES),
        statistics=(
            Statistic(name="light", kind="mean", program="look"),
            Statistic(
                name="hours", kind="quantiles", program="look", edges=(0.0, 10.0, 20.0), probabilities=(0.25, 0.5, 1.0)
            ),
        ),
        weights=write_weights(tensors),
        parameters=parameter_specs(tensors, ["w", "b"]),
        limits=Limits(peak_bytes=1 << 20, flops_per_example=100, upload_bytes=4 * LENGTH),
        privacy=PrivacyPolicy(
            min_cohort=min_cohort,
            threshold=0.6,
            max_clip=100.0,
            max_bits=16,
            **{"modes": ("secure", "plain"), "colluders": 0.0, "min_contributors": 1, "queries": 256, **(policy or {})},
        ),
        key=signer,
        schedule=(Phase(program="train", batch_size=8, epochs=1),),
        strategy=strategy,
        lineage=lineage or Lineage(),
        not_after=not_after,
        card=card,
    )
    file = folder / f"{path}.bundle"
    pack(folder / path, file)
    return file
