"""The history of a fit as a table: what is measured of the training form, and what of the answers of `predict`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from archipel.bundle import Program
from archipel.cli.input_output.tables import table
from archipel.lite_runtime import History
from archipel.protocol.metrics.measures import COUNT, measured


def evaluation_means(evaluate: Program, metrics: Mapping[str, float], examples: int) -> dict[str, float]:
    """What an evaluation of so many examples gave, as means by name, and over how many labels: `count`."""
    means = measured(evaluate, metrics, examples)
    return {**dict(sorted(means.values.items(), reverse=True)), COUNT: means.count}


def fit_table(history: History, epochs: int, validation: Sequence[Mapping[str, float]] = ()) -> str:
    """One line an epoch: the mean loss and accuracy of its steps, and the means of the validation after it."""
    # Every epoch has the same number of steps.
    size = max(1, math.ceil(len(history.losses) / epochs))
    steps = {"loss": history.losses}
    if "accuracy" in history.metrics:
        steps["accuracy"] = history.metrics["accuracy"]
    names = list(validation[0]) if validation else []
    heads = ["epoch", *(f"training {name}" for name in steps), *(f"validation {name}" for name in names)]
    rows = []
    for epoch in range(math.ceil(len(history.losses) / size)):
        part = slice(epoch * size, (epoch + 1) * size)
        metrics = validation[epoch] if epoch < len(validation) else {}
        rows.append([
            str(epoch + 1),
            *(f"{_mean(values[part]):.4f}" for values in steps.values()),
            *(f"{metrics.get(name, math.nan):.6g}" for name in names),
        ])  # fmt: skip
    return "\n".join(table(heads, rows, numbers=len(heads)))


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan
