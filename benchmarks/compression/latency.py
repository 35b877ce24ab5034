"""Latency at batch 1, of graphs in ONNX Runtime and in other engines, in turns."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import beside  # noqa: F401
import numpy as np
from lite_predict import Runner, in_process, raw_run, raw_session, timed
from verdict import median_interval

BASE = "float"
THREADS = (1, 2)
ROUNDS, QUICK_ROUNDS = 21, 5


def runner(name: str, path: Path, threads: int, example: np.ndarray) -> Runner:
    """`example`: [1, ...], the same for all."""
    return in_process(name, raw_run(raw_session(path, threads)), example)


def measured(runners: Sequence[Runner], quick: bool = False) -> dict[str, Any]:
    """{"times": name -> {"us": the median prediction, "ratio": [the median over rounds of what it is to BASE's, and the
    ends of the median's interval]}}.
    """
    times = timed(list(runners), QUICK_ROUNDS if quick else ROUNDS)
    found = {}
    for name, values in times.items():
        ratios = [a / b for a, b in zip(values, times[BASE])]
        found[name] = {
            "us": statistics.median(values),
            "ratio": [statistics.median(ratios), *median_interval(ratios)],
        }
    return {"times": found}


@dataclass(frozen=True)
class Latency:
    """`us`: the median prediction in microseconds; `ratio` to the float model with its 95% interval over rounds."""

    us: float
    ratio: float
    low: float
    high: float

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Latency:
        return cls(found["us"], *found["ratio"])

    def __str__(self) -> str:
        return f"{self.ratio:.2f} [{self.low:.2f}, {self.high:.2f}]"
