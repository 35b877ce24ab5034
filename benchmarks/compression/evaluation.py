"""Which test examples a model gets right, and 95% intervals of what two models differ by on the same examples."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnxruntime
from scipy.special import log_softmax

from archipel.compression.agreement import RESAMPLES, bootstrap, wald_plus_two
from archipel.datasets import Labelled

BATCH = 250
METHOD = (
    "Wald intervals of the discordant pairs, 1/2 added to each cell (Agresti and Min 2005); over several seeds a "
    f"percentile bootstrap over test examples, {RESAMPLES:,} resamples (Efron and Tibshirani 1993, chapter 13), an "
    "example counting with its mean over seeds"
)


@dataclass(frozen=True)
class Difference:
    """Points of accuracy that `b` has more than `a`, with the ends of its 95% interval; `seeds`: of each seed."""

    points: float
    low: float
    high: float
    seeds: tuple[float, ...]

    def __str__(self) -> str:
        return f"{self.points:+.2f} [{self.low:+.2f}, {self.high:+.2f}]"


def predictions(path: Path, inputs: np.ndarray) -> np.ndarray:
    """The class that the ONNX file gives each input, int64 [n]."""
    classes: np.ndarray = logits(path, inputs).argmax(axis=1)
    return classes


def logits(path: Path, inputs: np.ndarray) -> np.ndarray:
    """What the ONNX file answers to each input, float32 [n, classes]; in ONNX Runtime."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    parts = [session.run(None, {name: inputs[start : start + BATCH]})[0] for start in range(0, len(inputs), BATCH)]
    return np.concatenate(parts)


def divergence(of: np.ndarray, found: np.ndarray) -> float:
    """Mean Kullback-Leibler divergence of answers `found` from those `of` another model, in nats; both [n, classes]."""
    before, after = log_softmax(of, axis=1), log_softmax(found, axis=1)
    return float((np.exp(before) * (before - after)).sum(axis=1).mean())


def right(classes: np.ndarray, examples: Labelled) -> str:
    """Which examples are right, a bit each, as text."""
    return base64.b64encode(np.packbits(classes == examples.labels).tobytes()).decode()


def unpacked(text: str, count: int) -> np.ndarray:
    """bool [count] of what `right` wrote."""
    return np.unpackbits(np.frombuffer(base64.b64decode(text), np.uint8))[:count].astype(bool)


def accuracy(text: str, count: int) -> float:
    """In percent."""
    return 100 * float(unpacked(text, count).mean())


def difference(pairs: Sequence[tuple[str, str]], count: int) -> Difference:
    """b - a over (a, b) of each seed, all on the same `count` examples; see METHOD."""
    rows = [unpacked(b, count).astype(float) - unpacked(a, count) for a, b in pairs]
    if len(rows) == 1:
        # Models that agree on every example of a sample may differ on others, which resampling cannot see.
        low, high = wald_plus_two(int((rows[0] < 0).sum()), int((rows[0] > 0).sum()), count)
    else:
        low, high = bootstrap(np.mean(rows, axis=0), seed=0)
    return Difference(100 * float(np.mean(rows)), 100 * low, 100 * high, tuple(100 * float(row.mean()) for row in rows))
