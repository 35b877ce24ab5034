"""The results of training."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from archipel.bundle.roles import Metric


class Progress(NamedTuple):
    """A finished training step of number `phase` of the schedule. `epoch` and `step` count from 0, steps over all
    phases; `loss` is None if the program has no metric.

    Example:
        def show(progress):
            print(progress.epoch, progress.step, progress.loss)

        runtime.fit(x, y, epochs=1, batch_size=100, callbacks=[show])
    """

    phase: int
    epoch: int
    step: int
    loss: float | None


Callback = Callable[[Progress], object]
"""Called after every step. Returning True ends a `fit` after this step; raising leaves the runtime as it was."""


@dataclass(frozen=True)
class History:
    """The result of a `fit`. `losses` and each of `metrics` have a float per step, `validation` the metrics per epoch.

    `steps` counts minibatches, `examples` the examples used, each once; `stopped` says that a callback or the control
    ended it early.

    Example:
        history = runtime.fit(x, y, epochs=2)
        print(history.losses[0], "->", history.losses[-1])
    """

    losses: list[float]
    metrics: dict[str, list[float]]
    validation: list[dict[str, float]]
    steps: int
    examples: int
    stopped: bool = False


@dataclass(frozen=True)
class LocalUpdate:
    """The result of a local round: `arrays` by the names of the `finish` program's update outputs, to be encoded.

    `examples` and `steps` (minibatches) count what was trained on. `metrics` are the reduced metrics of training and of
    `finish`; `losses` has a float per step; `parameters` are the
    trained model, which stays on the device.

    Example:
        update = runtime.local_round(x, y, seed=1)
        print({name: array.shape for name, array in update.arrays.items()})
    """

    arrays: dict[str, np.ndarray]
    examples: int
    steps: int
    metrics: dict[str, float]
    losses: list[float]
    parameters: dict[str, np.ndarray] = field(repr=False)


class MetricTable:
    """Collects metrics over steps or batches and reduces each as its role declares."""

    def __init__(self) -> None:
        self.values: dict[str, list[float]] = {}
        self.weights: dict[str, list[float]] = {}
        self.reductions: dict[str, str] = {}

    def add(self, port: Metric, value: float, weight: float) -> None:
        """Add a value that stands for `weight` examples; only the reduction "mean" uses the weight."""
        self.reductions[port.name] = port.reduction
        self.values.setdefault(port.name, []).append(value)
        self.weights.setdefault(port.name, []).append(weight)

    def reduce(self) -> dict[str, float]:
        """The reduced metrics by name."""
        return {name: self._reduce(name, values) for name, values in self.values.items()}

    def _reduce(self, name: str, values: list[float]) -> float:
        reduction = self.reductions[name]
        if reduction == "last":
            return values[-1]
        if reduction == "sum":
            # fsum rounds once, so the result does not depend on the order.
            return math.fsum(values)
        weights = self.weights[name]
        total = math.fsum(weights)
        # Without any weight there is no mean; 0 would look like a perfect loss.
        if total == 0:
            return math.nan
        return math.fsum(value * weight for value, weight in zip(values, weights)) / total


def loss_of(metrics: Sequence[Metric]) -> Metric | None:
    """The metric that is the loss: the one called "loss", else the program's first."""
    return next((port for port in metrics if port.name == "loss"), metrics[0] if metrics else None)
