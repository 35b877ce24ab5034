"""The result of a search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from archipel.compression.recipe import write_recipe
from archipel.compression.search.point import MODEL, Metrics, Point, pareto
from archipel.compression.search.target import Target

COSTS = {
    "size": lambda metrics: metrics.nbytes,
    "latency": lambda metrics: metrics.latency_ratio,
    "flops": lambda metrics: metrics.flops,
}
"""Costs that quality is traded for, by their names in a target."""


@dataclass(frozen=True)
class SearchResult:
    """All points in the order in which they were made, and the best of them.

    `failed`: (recipe as TOML, reason) for recipes that could not be applied. `exhausted`: the space held no new recipe
    before the trials were used up.
    """

    target: Target
    original: Metrics
    points: tuple[Point, ...]
    failed: tuple[tuple[str, str], ...]
    folder: Path
    seed: int
    exhausted: bool = False

    @property
    def meeting(self) -> tuple[Point, ...]:
        """The points that meet the target."""
        return tuple(point for point in self.points if self.target.met(point.metrics, self.original))

    @property
    def best(self) -> Point | None:
        """The most accurate point that meets the target, or None.

        If the target bounds only the accuracy: the smallest one. Ties go to the smaller, then the faster point.
        """

        def order(point: Point) -> tuple[float, ...]:
            m = point.metrics
            ranks = (-m.quality, float(m.nbytes), m.latency_ratio)
            return ranks if self.target.quantities != {"accuracy"} else (ranks[1], ranks[0], ranks[2])

        return min(self.meeting, key=order, default=None)

    @property
    def nearest(self) -> Point | None:
        """The point that misses the target by least; `best` if there is one."""
        if self.best is not None or not self.points:
            return self.best
        return min(self.points, key=lambda p: (self.target.distance(p.metrics, self.original), p.metrics.nbytes))

    def front(self, cost: str = "size") -> tuple[Point, ...]:
        """The Pareto front of quality against "size", "latency" or "flops", from the cheapest point on."""
        return pareto(self.points, COSTS[cost])

    def verdict(self) -> str:
        """A sentence: which point meets the target, or what the nearest one misses."""
        best, nearest = self.best, self.nearest
        if best is not None:
            return f"point {best.number} meets {self.target}: {best.title}"
        if nearest is None:
            return f"no recipe could be applied, so nothing meets {self.target}"
        missed = ", ".join(self.target.missed(nearest.metrics, self.original))
        near = f"the nearest is point {nearest.number}, which misses {missed}: {nearest.title}"
        return f"no point meets {self.target}; {near}"

    def to_dict(self) -> dict[str, Any]:
        """The same as numbers, strings, lists and dictionaries."""
        return {
            "target": str(self.target),
            "original": asdict(self.original),
            "points": [self._row(point) for point in self.points],
            "failed": [{"recipe": recipe, "error": error} for recipe, error in self.failed],
            "best": None if self.best is None else self.best.number,
            "nearest": None if self.nearest is None else self.nearest.number,
            "front": {cost: [point.number for point in self.front(cost)] for cost in COSTS},
            "seed": self.seed,
            "exhausted": self.exhausted,
        }

    def _row(self, point: Point) -> dict[str, Any]:
        return {
            "point": point.number,
            "model": str(point.folder / MODEL),
            "recipe": write_recipe(point.recipe),
            "metrics": asdict(point.metrics),
            "seconds": point.seconds,
            "met": self.target.met(point.metrics, self.original),
        }

    def __str__(self) -> str:
        head = ("", "bytes", "MFLOPs", "accuracy", "loss", "latency", "met", "recipe")
        rows = [head, ("original", *_cells(self.original), "", "")]
        met, front = set(self.meeting), set(self.front())
        for point in self.points:
            mark = "yes" if point in met else ""
            number = f"{point.number}{'*' if point in front else ''}"
            rows.append((number, *_cells(point.metrics), mark, point.title))
        widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
        lines = [_line(row, widths) for row in rows]
        lines += [f"failed: {recipe}: {error}" for recipe, error in self.failed]
        ended = ["the space of recipes is exhausted"] if self.exhausted else []
        return "\n".join([*lines, "(* on the Pareto front of accuracy and bytes)", *ended])


def _cells(m: Metrics) -> tuple[str, ...]:
    accuracy = "-" if m.accuracy is None else f"{100 * m.accuracy:.2f} %"
    return f"{m.nbytes:,}", f"{m.flops / 1e6:.2f}", accuracy, f"{m.loss:.4f}", f"{m.latency_ratio:.2f}x"


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    cells = [cell.ljust(w) if i in (0, len(row) - 1) else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths))]
    return "  ".join(cells).rstrip()
