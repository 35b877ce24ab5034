"""What a device's evaluation comes to, under the names that tasks and gates ask for.

| the program's metric | is asked for as | and is, on each device |
|---|---|---|
| reduced by sum, such as `loss` | its own name | its sum divided by the labels that count |
| `correct`, reduced by sum | `accuracy` | the share of those labels |
| reduced by mean, or the last one | its own name | itself |

The labels that count are the program's own `count`, where it has one, else the examples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from archipel.bundle import Program
from archipel.bundle.roles import Metric

COUNT, CORRECT, ACCURACY = "count", "correct", "accuracy"


@dataclass(frozen=True)
class Measured:
    """`values` are means over `count` labels; without any there are none."""

    values: Mapping[str, float]
    count: int


def measures(program: Program) -> dict[str, str]:
    """The metric of an `evaluate` program behind each name that can be asked for."""
    ports = _metrics(program)
    return {
        ACCURACY if name == CORRECT and port.reduction == "sum" and ACCURACY not in ports else name: name
        for name, port in ports.items()
        if not (name == COUNT and port.reduction == "sum")
    }


def measured(program: Program, metrics: Mapping[str, float], examples: int) -> Measured:
    """Of `metrics` as the runtime's `evaluate` gives them for so many examples."""
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
