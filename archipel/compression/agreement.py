"""Two classifiers on the same examples: how often they agree, and whether one is better."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from archipel.errors import CompressionError

Z = 1.959963984540054  # of a 95% interval
RESAMPLES = 10_000

ONE_LABEL = "Wald interval of the discordant pairs, 1/2 added to each cell (Agresti and Min 2005)"
SEVERAL_LABELS = "percentile bootstrap over whole examples, 10,000 resamples (Efron and Tibshirani 1993, chapter 13)"


@dataclass(frozen=True)
class PairedAccuracy:
    """Accuracies of a and b on the same labels, and the difference b - a with its 95% interval, from -1 to 1.

    `only_a` and `only_b` count the labels that only a or only b predicts. `method` names the interval.
    """

    a: float
    b: float
    difference: float
    low: float
    high: float
    only_a: int
    only_b: int
    labels: int
    method: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Agreement:
    """Counts over batches. The classes lie along axis 1 of the output, or along the axis that the labels lack."""

    labels: int = 0
    same: int = 0
    correct_a: list[np.ndarray] = field(default_factory=list)
    correct_b: list[np.ndarray] = field(default_factory=list)

    def add(self, a: np.ndarray, b: np.ndarray, labels: np.ndarray | None) -> None:
        """Count one batch of outputs [batch, classes, ...]. Raises CompressionError for labels that do not fit."""
        axis = 1 if labels is None else class_axis(a.shape, labels.shape)
        best_a, best_b = a.argmax(axis=axis), b.argmax(axis=axis)
        self.labels += best_a.size
        self.same += int((best_a == best_b).sum())
        if labels is not None:
            # One row for each example: the labels of an example are not independent, so the bootstrap draws rows.
            self.correct_a.append((best_a == labels).reshape(len(labels), -1))
            self.correct_b.append((best_b == labels).reshape(len(labels), -1))

    @property
    def share(self) -> float | None:
        """The share of predicted classes that are the same, from 0 to 1; None without predictions."""
        return self.same / self.labels if self.labels else None

    def accuracy(self, seed: int = 0) -> PairedAccuracy | None:
        """The accuracy of both; None without labels. `seed` is that of the bootstrap."""
        if not self.correct_a:
            return None
        a, b = np.concatenate(self.correct_a), np.concatenate(self.correct_b)
        only_a, only_b = int((a & ~b).sum()), int((b & ~a).sum())
        if a.shape[1] == 1:
            low, high = wald_plus_two(only_a, only_b, len(a))
        else:
            low, high = bootstrap(b.mean(axis=1) - a.mean(axis=1), seed)
        method = ONE_LABEL if a.shape[1] == 1 else SEVERAL_LABELS
        difference = float(b.mean()) - float(a.mean())
        return PairedAccuracy(
            float(a.mean()), float(b.mean()), difference, low, high, only_a, only_b, int(a.size), method
        )


def class_axis(output: tuple[int, ...], labels: tuple[int, ...]) -> int:
    """The axis of an output that labels of this shape lack: 1 if possible, else the last. Raises CompressionError."""
    for axis in (1, len(output) - 1):
        if 0 < axis < len(output) and output[:axis] + output[axis + 1 :] == labels:
            return axis
    raise CompressionError(
        f"labels of shape {list(labels)} do not fit an output of shape {list(output)}; expected the output's shape "
        "without its axis of classes"
    )


def wald_plus_two(only_a: int, only_b: int, count: int) -> tuple[float, float]:
    """95% interval of a difference of paired proportions, (only_b - only_a) / count (Agresti and Min 2005)."""
    size = count + 2
    difference = (only_b - only_a) / size
    deviation = math.sqrt(only_a + only_b + 1 - (only_b - only_a) ** 2 / size) / size
    return max(-1.0, difference - Z * deviation), min(1.0, difference + Z * deviation)


def bootstrap(differences: np.ndarray, seed: int) -> tuple[float, float]:
    """95% percentile interval of the mean of `differences`, one for each example."""
    values, counts = np.unique(differences, return_counts=True)
    # Drawing examples with replacement is a multinomial draw of how often each value occurs, and much faster.
    draws = np.random.default_rng(seed).multinomial(len(differences), counts / len(differences), RESAMPLES)
    low, high = np.percentile(draws @ values / len(differences), [2.5, 97.5])
    return float(low), float(high)
