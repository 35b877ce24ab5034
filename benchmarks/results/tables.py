"""What the tables of docs/results.md share: options, cells that are kept, mean and spread over seeds, pictures."""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from measure import arguments, print_alone, state_run

from archipel.durable import write_durably

LIBRARIES = ("numpy", "onnxruntime", "torch")
Curve = Sequence[tuple[float, float]]
"""Points of one run: (round or second, value)."""


def result_arguments(description: str | None, data: str = "") -> argparse.ArgumentParser:
    """The options of every table; `data` says what lies in the folder that --data names, "" where none is needed."""
    parser = arguments(description)
    if data:
        parser.add_argument("--data", type=Path, required=True, help=f"the folder with {data}")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--folder", type=Path, help="keeps finished cells, and how far the others are")
    parser.add_argument("--plot", type=Path, help="a picture of the curves (.png or .svg)")
    return parser


class Table:
    """Rows as they come: lines of a Markdown table for people, JSON lines for programs; and cells that are kept.

    Arguments:
        name: of the script.
        options: as `result_arguments` parsed them.
        columns: the titles of the columns that follow the case.
    """

    def __init__(self, name: str, options: argparse.Namespace, columns: Sequence[str]) -> None:
        self._name, self._json, self._folder = name, options.json, options.folder
        self._made: dict[str, Any] = {}
        self._kept = f"{name}-quick" if options.quick else name
        state_run(options.json, LIBRARIES)
        if not options.json:
            print(f"\n| | {' | '.join(columns)} |\n|{'---|' * (1 + len(columns))}", flush=True)

    def cell(self, key: str, make: Callable[[], Any]) -> Any:
        """What `make` returns, which JSON can hold; of a cell that is there or in the folder already, what it was."""
        if self._folder is None:
            if key not in self._made:
                self._made[key] = make()
            return self._made[key]
        file = self._folder / f"{self._kept}-{key}.json"
        if not file.exists():
            value = make()
            self._folder.mkdir(parents=True, exist_ok=True)
            write_durably(file, json.dumps(value).encode(), 0o666)
        return json.loads(file.read_bytes())

    def run_folder(self, key: str) -> Path | None:
        """Where the simulation of a cell keeps how far it is."""
        return None if self._folder is None else self._folder / f"{self._kept}-{key}"

    def add(
        self, case: str, texts: Sequence[str], *, published: tuple[str, float] | None = None, **measured: float
    ) -> None:
        """Print a row: `texts` for people, `measured` by unit for programs, the first of them beside what was
        `published`: by whom, and the number."""
        if not self._json:
            print(f"| {case} | {' | '.join(texts)} |", flush=True)
            return
        if published is not None:
            unit, ours = next(iter(measured.items()))
            source, peer = published
            reached = ours if math.isfinite(ours) else None
            row = {"benchmark": self._name, "case": case, "ours": reached, "peer": peer, "peer_name": source}
            row |= {"ratio": None if reached is None else reached / peer, "unit": unit.replace("_", " ")}
            print(json.dumps(row), flush=True)
            measured.pop(unit)
        print_alone(self._name, case, **measured)


def spread(values: Sequence[float], digits: int = 1) -> str:
    """Mean and standard deviation over the seeds (of the values themselves: divided by their number)."""
    mean = f"{statistics.mean(values):.{digits}f}" if all(map(math.isfinite, values)) else "not reached"
    return mean if len(values) == 1 or "not" in mean else f"{mean} ± {statistics.pstdev(values):.{digits}f}"


def rising(curve: Curve) -> list[tuple[float, float]]:
    """The best value so far at each point, as McMahan et al. 2017 make their curves."""
    best = np.maximum.accumulate([value for _, value in curve])
    return [(where, float(value)) for (where, _), value in zip(curve, best)]


def reaches(curve: Curve, goal: float) -> float:
    """Where the rising curve first has the goal, between two points on the line through them; infinite where never."""
    before: tuple[float, float] | None = None
    for where, value in rising(curve):
        if value >= goal:
            if before is None or value == before[1]:
                return where
            return before[0] + (where - before[0]) * (goal - before[1]) / (value - before[1])
        before = where, value
    return math.inf


def draw_curves(
    file: Path,
    panels: Mapping[str, Mapping[str, Sequence[Curve]]],
    across: str,
    up: str,
    goals: Sequence[float] = (),
    *,
    log: bool = False,
    marks: Sequence[float] = (),
) -> None:
    """A panel by title, in it a line by name: the mean of its runs, with the range from the lowest to the highest.

    Arguments:
        file: is replaced; .png or .svg.
        panels: the runs of each line.
        across, up: what the axes have.
        goals: dashed lines, one for each panel.
        log: whether the axis across is logarithmic.
        marks: where that axis has numbers; none: where it is left to the library.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2 * len(panels), 3.2), layout="constrained")
    for number, (axes, (title, lines)) in enumerate(
        zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items())
    ):
        for name, runs in lines.items():
            length = min(map(len, runs))
            places = [where for where, _ in runs[0][:length]]
            values = np.array([[value for _, value in run[:length]] for run in runs])
            (line,) = axes.plot(places, values.mean(0), linewidth=1.2, label=name)
            axes.fill_between(places, values.min(0), values.max(0), color=line.get_color(), alpha=0.2, linewidth=0)
        if goals:
            axes.axhline(goals[number], color="grey", linewidth=0.8, linestyle="--")
        if log:
            axes.set_xscale("log")
        if marks:
            axes.set_xticks(marks, [f"{mark:g}" for mark in marks])
            axes.set_xticks([], minor=True)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel(across)
        axes.set_ylabel(up)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(file, dpi=100)
