"""Latency on the Lite runtime: models run in turns on one thread, so that slow phases of the machine affect all."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from archipel.compression.bare_bundle import write_bare_bundle
from archipel.graph import Model
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
    return load(folder, [write_bare_bundle(model, folder, "latency")], threads=1, delegates=["cpu"])
