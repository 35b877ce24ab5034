"""Latency at batch 1, of graphs in ONNX Runtime and in other engines, in turns."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import beside  # noqa: F401
import numpy as np
from lite_predict import Runner, in_process, raw_run, raw_session, timed

BASE = "float"
ROUNDS, QUICK_ROUNDS = 21, 5


def runner(name: str, path: Path, threads: int, example: np.ndarray) -> Runner:
    """`example`: [1, ...], the same for all."""
    return in_process(name, raw_run(raw_session(path, threads)), example)


def compared(runners: Sequence[Runner], rounds: int, base: str = BASE) -> dict[str, Any]:
    """By name: microseconds a prediction (median over rounds), and the median of the rounds' ratios to `base`."""
    times = timed(list(runners), rounds)
    return {
        name: {
            "us": statistics.median(values),
            "ratio": statistics.median(a / b for a, b in zip(values, times[base])),
        }
        for name, values in times.items()
    }
