"""The results of a device's evaluation, under the names that tasks and gates ask for.

| metric of the program | name | value on each device |
|---|---|---|
| reduced by sum, such as `loss` | its own | its sum divided by the number of labels |
| `correct`, reduced by sum | `accuracy` | the share of the labels |
| reduced by mean, or the last one | its own | itself |
| none: the device's clock | `predict_ms` | milliseconds of a prediction of one example |

The number of labels is the program's metric `count`, where it has one, else the number of examples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from archipel.bundle import Program
from archipel.bundle.roles import Metric

COUNT, CORRECT, ACCURACY = "count", "correct", "accuracy"
PREDICT_MS = "predict_ms"


@dataclass(frozen=True)
class Measured:
    """`values` are means over `count` labels; with a count of 0 there are no values."""

    values: Mapping[str, float]
    count: int


def measures(program: Program) -> dict[str, str]:
    """The metrics of an `evaluate` program by the names that tasks and gates ask for."""
    ports = _metrics(program)
    return {
        ACCURACY if name == CORRECT and port.reduction == "sum" and ACCURACY not in ports else name: name
        for name, port in ports.items()
        if not (name == COUNT and port.reduction == "sum")
    }


def askable(program: Program) -> list[str]:
    """What an evaluation with this program can ask for, sorted: its metrics, and the time of a prediction."""
    return sorted({*measures(program), PREDICT_MS})


def measured(program: Program, metrics: Mapping[str, float], examples: int) -> Measured:
    """The results from `metrics`, as the runtime's `evaluate` gives them for so many examples."""
    ports = _metrics(program)
    counts = COUNT in ports and ports[COUNT].reduction == "sum"
    count = round(metrics[COUNT]) if counts and examples else examples
    if count <= 0:
        return Measured({}, 0)
    values = {
        name: metrics[port] / count if ports[port].reduction == "sum" else metrics[port]
        for name, port in measures(program).items()
    }
    return Measured(values, count)


def _metrics(program: Program) -> dict[str, Metric]:
    return {port.name: port for port in program.outputs if isinstance(port, Metric)}
