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
THREADS = (1, 2)
ROUNDS, QUICK_ROUNDS = 21, 5


def runner(name: str, path: Path, threads: int, example: np.ndarray) -> Runner:
    """`example`: [1, ...], the same for all."""
    return in_process(name, raw_run(raw_session(path, threads)), example)


def measured(runners: Sequence[Runner], quick: bool = False) -> dict[str, Any]:
    """{"times": name -> {"us": the median prediction, "ratio": the median over rounds of what it is to BASE's}}."""
    times = timed(list(runners), QUICK_ROUNDS if quick else ROUNDS)
    found = {
        name: {
            "us": statistics.median(values),
            "ratio": statistics.median(a / b for a, b in zip(values, times[BASE])),
        }
        for name, values in times.items()
    }
    return {"times": found}
