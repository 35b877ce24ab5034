"""The history of a fit as a table: what is measured of the training form, and what of the answers of `predict`."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from archipel.bundle import Program
from archipel.bundle.roles import Metric
from archipel.cli.input_output.tables import table
from archipel.lite_runtime import History

_COUNT = "count"
_MEANS = {"loss": "loss", "correct": "accuracy"}


def fit_table(history: History, epochs: int, evaluate: Program | None = None) -> str:
    """One line an epoch: the mean loss and accuracy of its steps, and the validation's metrics after it.

    `evaluate` is the program that measured the validation: its sums over the examples are shown as means.
    """
    # Every epoch has the same number of steps.
    size = max(1, math.ceil(len(history.losses) / epochs))
    steps = {"loss": history.losses}
    if "accuracy" in history.metrics:
        steps["accuracy"] = history.metrics["accuracy"]
    sums = (
        set()
        if evaluate is None
        else {port.name for port in evaluate.outputs if isinstance(port, Metric) and port.reduction == "sum"}
    )
    validation = [_means(metrics, sums) for metrics in history.validation]
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


def _means(metrics: Mapping[str, float], sums: Collection[str]) -> dict[str, float]:
    count = metrics.get(_COUNT, 0.0) if _COUNT in sums else 0.0
    if not count:
        return dict(metrics)
    summed = {name for name in _MEANS if name in metrics and name in sums}
    means = {_MEANS[name]: metrics[name] / count for name in _MEANS if name in summed}
    return {**means, **{name: value for name, value in metrics.items() if name not in summed}}


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan
