"""Charts as data for a template: SVG paths of curves, and the numbers beside them for a table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

WIDTH, HEIGHT = 440.0, 200.0
LEFT, RIGHT, TOP, BOTTOM = 52.0, 12.0, 12.0, 28.0
_TICKS = 4


@dataclass(frozen=True)
class Tick:
    """A mark of an axis: where, in the drawing's units, and its label."""

    at: float
    label: str


@dataclass(frozen=True)
class Line:
    """One curve: its name, the `d` of its path, its points in the drawing with what they say, and its values by x."""

    name: str
    path: str
    points: tuple[tuple[float, float, str], ...]
    values: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Chart:
    """A drawing of `WIDTH` x `HEIGHT` units, and `rows` of the same numbers: x, and a value (or None) of each line."""

    title: str
    lines: tuple[Line, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    rows: tuple[tuple[float, tuple[float | None, ...]], ...]
    band: str = ""

    @property
    def summary(self) -> str:
        """The chart in a sentence, for who cannot see it."""
        parts = [
            f"{line.name} goes from {_label(line.values[0][1])} in round {line.values[0][0]:g} to "
            f"{_label(line.values[-1][1])} in round {line.values[-1][0]:g}"
            for line in self.lines if line.values
        ]  # fmt: skip
        return f"{self.title}: {'; '.join(parts)}."


def draw(title: str, series: dict[str, Sequence[tuple[float, float]]], *, band: tuple[str, str] | None = None) -> Chart:
    """A chart of curves by name, each of (x, y) in the order of x. Values that are not finite are left out.

    `band` names two of the curves, between which the area is shaded.
    """
    kept = {name: [(x, y) for x, y in points if math.isfinite(y)] for name, points in series.items()}
    kept = {name: points for name, points in kept.items() if points}
    xs = [x for points in kept.values() for x, _ in points]
    ys = [y for points in kept.values() for _, y in points]
    if not xs:
        return Chart(title, (), (), (), ())
    x_low, x_high = _room(min(xs), max(xs))
    y_marks = _marks(min(ys), max(ys))
    y_low, y_high = min(y_marks[0], min(ys)), max(y_marks[-1], max(ys))

    def place(x: float, y: float) -> tuple[float, float]:
        across = LEFT + (x - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)
        down = TOP + (y_high - y) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM)
        return round(across, 1), round(down, 1)

    lines = []
    for name, points in kept.items():
        placed = [(*place(x, y), f"{name} in round {x:g}: {_label(y)}") for x, y in points]
        path = "M" + " L".join(f"{x} {y}" for x, y, _ in placed)
        lines.append(Line(name, path, tuple(placed) if len(placed) <= 60 else (), tuple(points)))
    shaded = ""
    if band is not None and all(name in kept for name in band):
        there = [place(x, y) for x, y in kept[band[0]]]
        back = [place(x, y) for x, y in reversed(kept[band[1]])]
        shaded = "M" + " L".join(f"{x} {y}" for x, y in there + back) + " Z"
    by_name = {line.name: dict(line.values) for line in lines}
    rows = tuple((x, tuple(by_name[line.name].get(x) for line in lines)) for x in sorted(set(xs)))
    x_ticks = tuple(
        Tick(place(x, y_low)[0], f"{x:g}") for x in _marks(x_low, x_high) if x == int(x) and x_low <= x <= x_high
    )
    y_ticks = tuple(Tick(place(x_low, y)[1], _label(y)) for y in y_marks)
    return Chart(title, tuple(lines), x_ticks, y_ticks, rows, shaded)


def curves_of(results: Sequence[Any]) -> list[Chart]:
    """One chart for each quantity of a task's results, such as `loss` of training and evaluation together."""
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for result in results:
        for name, value in result.metrics.items():
            quantity = name.rsplit(" ", 1)[-1] if name.startswith(("training ", "evaluation ")) else name
            found.setdefault(quantity, {}).setdefault(name, []).append((result.number, value))
        if result.step_norm is not None:
            step = found.setdefault("length of the step", {})
            step.setdefault("length of the step", []).append((result.number, result.step_norm))
    drawn = [draw(quantity, dict(series)) for quantity, series in found.items()]
    return [chart for chart in drawn if chart.lines]


@dataclass(frozen=True)
class Spread:
    """How a metric is spread over devices: its curves, and the newest distribution."""

    chart: Chart
    newest: Any


def deciles_of(results: Sequence[Any]) -> list[Spread]:
    """Fairness over devices: for each metric with distributions the 10 %, 50 % and 90 % quantiles by round."""
    found: dict[str, list[tuple[float, Any]]] = {}
    for result in results:
        for name, distribution in result.distributions.items():
            found.setdefault(name, []).append((result.number, distribution))
    spreads = []
    for name, rounds in found.items():
        series = {
            label: [(number, each.deciles[place].value) for number, each in rounds]
            for label, place in (("90 % of devices below", 8), ("median device", 4), ("10 % of devices below", 0))
        }
        series["worst tenth, mean"] = [(number, each.worst.value) for number, each in rounds]
        band = ("90 % of devices below", "10 % of devices below")
        spreads.append(Spread(draw(f"{name} over devices", dict(series), band=band), rounds[-1][1]))
    return spreads


def _room(low: float, high: float) -> tuple[float, float]:
    """The range of an axis, which one point alone does not give."""
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _marks(low: float, high: float) -> list[float]:
    """Round numbers over a range, a few of them; the first and last enclose it."""
    low, high = _room(low, high)
    raw = (high - low) / _TICKS
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, last + 1)]


def _label(value: float) -> str:
    return f"{value:.4g}"
