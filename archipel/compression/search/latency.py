"""Latency on the Lite runtime: models run in turns on one thread, so that slow phases of the machine affect all."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import numpy as np

from archipel.bundle import (
    Limits,
    PrivacyPolicy,
    Program,
    generate_key,
    write_bundle,
    write_weights,
)
from archipel.bundle.roles import DType, Example, Output
from archipel.graph import Model
from archipel.graph.slim import slim
from archipel.lite_runtime import ModelRuntime, load

LEAST, MOST, WARM_UP, SECONDS = 15, 2000, 3, 0.3


def latencies(models: Sequence[Model], fields: Mapping[str, np.ndarray], seconds: float = SECONDS) -> list[float]:
    """The median time of one prediction of `fields` for each model, in microseconds, on one thread of the CPU.

    The models run in turns, LEAST to MOST times each, as often as `seconds` for all of them allow.
    """
    with tempfile.TemporaryDirectory(prefix="archipel-latency-") as folder:
        runtimes = [_runtime(model, Path(folder) / str(number)) for number, model in enumerate(models)]
        feed = dict(fields)
        # The first predictions are slower.
        for runtime in runtimes * WARM_UP:
            runtime.predict(feed)
        times: list[list[int]] = [[] for _ in runtimes]
        deadline = time.perf_counter() + seconds
        for turn in range(MOST):
            if turn >= LEAST and time.perf_counter() > deadline:
                break
            for runtime, samples in zip(runtimes, times):
                started = time.perf_counter_ns()
                runtime.predict(feed)
                samples.append(time.perf_counter_ns() - started)
    return [statistics.median(samples) / 1e3 for samples in times]


def _runtime(model: Model, folder: Path) -> ModelRuntime:
    """The model in a bundle of its own, signed by a key that nobody keeps: the runtime opens nothing else."""
    key = generate_key()
    predict = Program(
        kind="predict",
        file="predict.onnx",
        inputs=tuple(Example(name=i.name, dtype=cast(DType, i.dtype), shape=i.shape) for i in model.inputs),
        outputs=tuple(Output(name=o.name, dtype=cast(DType, o.dtype), shape=o.shape) for o in model.outputs),
    )
    write_bundle(
        folder,
        name="latency",
        programs={"predict": predict},
        graphs={"predict.onnx": slim(model.ir).SerializeToString()},
        weights=write_weights({}),
        parameters=(),
        limits=Limits(peak_bytes=1, flops_per_example=1, upload_bytes=0),
        privacy=PrivacyPolicy(modes=("secure",), min_cohort=3, threshold=0.67, max_clip=1.0, max_bits=16),
        key=key,
    )
    return load(folder, [key.public_key().public_bytes_raw()], threads=1, delegates=["cpu"])
