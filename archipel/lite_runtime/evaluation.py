"""Computes metrics over a whole data set: `predict` answers batch by batch, `evaluate` compares with the labels."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from archipel.bundle import Bundle
from archipel.bundle.roles import Example, ExampleWeight, Input, Label, Metric, Prediction
from archipel.errors import RuntimeInputError
from archipel.lite_runtime.engines.program_session import ProgramSession
from archipel.lite_runtime.fields import collect, fixed_rows
from archipel.lite_runtime.out_of_range import locating
from archipel.lite_runtime.predictor import Predictor
from archipel.lite_runtime.training.driver import need_program
from archipel.lite_runtime.training.results import MetricTable
from archipel.lite_runtime.values import Values, fixed_shape


def evaluation_fields(bundle: Bundle) -> tuple[Input, ...]:
    """The fields that an evaluation reads: examples for `predict`, labels and weights for `evaluate`.

    Raises RuntimeProgramError for a bundle without one of these programs.
    """
    measured = bundle.program(need_program(bundle, "evaluate", "evaluate"))
    predicted = bundle.program(need_program(bundle, "predict", "evaluate"))
    examples = [port for port in predicted.inputs if isinstance(port, Example)]
    return (*examples, *(port for port in measured.inputs if isinstance(port, Label | ExampleWeight)))


def evaluate(
    bundle: Bundle,
    predictor: Predictor,
    session: ProgramSession,
    values: Values,
    x: np.ndarray | Mapping[str, np.ndarray],
    y: np.ndarray | None,
    batch_size: int,
) -> dict[str, float]:
    """Predict all examples and measure the answers with the `evaluate` program, which runs in `session`.

    Each metric is reduced as its role declares. Graphs made for batches of one size get such batches, the last one
    padded with examples of weight 0; without an example_weight input the number of examples must be a multiple of the
    size. Raises RuntimeInputError.
    """
    if batch_size < 1:
        raise RuntimeInputError(f"evaluate: batch_size must be at least 1, got {batch_size}")
    program = bundle.program(need_program(bundle, "evaluate", "evaluate"))
    ports = evaluation_fields(bundle)
    fields = collect("evaluate", ports, x, y)
    predictions = [port for port in program.inputs if isinstance(port, Prediction)]
    others = [port for port in program.inputs if port not in ports and port not in predictions]
    constant = {port.name: np.asarray(values.read(port), order="C") for port in others}
    weights = [port for port in ports if isinstance(port, ExampleWeight)]
    rows = fixed_rows(ports)
    if rows is not None and not weights and fields.count % rows:
        raise RuntimeInputError(
            f"evaluate: {fields.count} examples, but the graph is made for batches of {rows}; give a multiple of that"
        )
    metrics = [port for port in program.outputs if isinstance(port, Metric)]
    names = [port.name for port in metrics]
    table = MetricTable()
    with locating(bundle, fields.arrays):
        for first in range(0, fields.count, rows or batch_size):
            used = min(rows or batch_size, fields.count - first)
            batch = {name: _rows(array[first : first + used], rows, 1) for name, array in fields.arrays.items()}
            # The batch's weight in a metric with reduction "mean": its examples, or their weights.
            total = float(used)
            for port in weights:
                weight = fields.arrays.get(port.name)
                rest = fixed_shape(port, first=1)
                part = np.ones((used, *rest), port.dtype) if weight is None else weight[first : first + used]
                batch[port.name] = _rows(part, rows, 0)
                total = float(part.sum())
            examples = {port.name: batch.pop(port.name) for port in ports if isinstance(port, Example)}
            answers = predictor.many(examples)
            batch.update({port.name: answers[port.output] for port in predictions})
            for metric, value in zip(metrics, session.run(names, {**constant, **batch})):
                table.add(metric, float(value), total)
    return table.reduce()


def _rows(array: np.ndarray, rows: int | None, fill: int) -> np.ndarray:
    missing = 0 if rows is None else rows - len(array)
    if missing:
        # Any example works: its weight is 0.
        array = np.concatenate([array, np.repeat(array[:1] * fill, missing, axis=0)])
    return np.asarray(array, order="C")
