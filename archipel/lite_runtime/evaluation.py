"""Computes metrics over a whole data set, batch by batch."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from archipel.bundle import Program
from archipel.bundle.roles import ExampleWeight, Metric
from archipel.errors import RuntimeInputError
from archipel.lite_runtime.fields import FIELD_ROLES, collect, fixed_rows
from archipel.lite_runtime.sessions import Session
from archipel.lite_runtime.training.results import MetricTable
from archipel.lite_runtime.values import Values, fixed_shape


def evaluate(
    session: Session,
    program: Program,
    values: Values,
    x: np.ndarray | Mapping[str, np.ndarray],
    y: np.ndarray | None,
    batch_size: int,
) -> dict[str, float]:
    """Run an `evaluate` program over all examples; each metric is reduced as its role declares.

    A graph made for batches of one size gets such batches, the last one padded with examples of weight 0; without an
    example_weight input the number of examples must be a multiple of the size. Raises RuntimeInputError.
    """
    if batch_size < 1:
        raise RuntimeInputError(f"evaluate: batch_size must be at least 1, got {batch_size}")
    ports = [port for port in program.inputs if isinstance(port, FIELD_ROLES)]
    fields = collect("evaluate", ports, x, y)
    constant = {port.name: np.asarray(values.read(port), order="C") for port in program.inputs if port not in ports}
    weights = [port for port in ports if isinstance(port, ExampleWeight)]
    rows = fixed_rows(ports)
    if rows is not None and not weights and fields.count % rows:
        raise RuntimeInputError(
            f"evaluate: {fields.count} examples, but the graph is made for batches of {rows}; give a multiple of that"
        )
    metrics = [port for port in program.outputs if isinstance(port, Metric)]
    names = [port.name for port in metrics]
    table = MetricTable()
    for first in range(0, fields.count, rows or batch_size):
        used = min(rows or batch_size, fields.count - first)
        feed = dict(constant)
        # The batch's weight in a metric with reduction "mean": its examples, or their weights.
        total = float(used)
        for name, array in fields.arrays.items():
            feed[name] = _rows(array[first : first + used], rows, 1)
        for port in weights:
            weight = fields.arrays.get(port.name)
            rest = fixed_shape(port, first=1)
            part = np.ones((used, *rest), port.dtype) if weight is None else weight[first : first + used]
            feed[port.name] = _rows(part, rows, 0)
            total = float(part.sum())
        for metric, value in zip(metrics, session.run(names, feed)):
            table.add(metric, float(value), total)
    return table.reduce()


def _rows(array: np.ndarray, rows: int | None, fill: int) -> np.ndarray:
    missing = 0 if rows is None else rows - len(array)
    if missing:
        # Any example works: its weight is 0.
        array = np.concatenate([array, np.repeat(array[:1] * fill, missing, axis=0)])
    return np.asarray(array, order="C")
