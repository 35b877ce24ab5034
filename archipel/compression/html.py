"""Reports of `compress` and `search` as one HTML page that needs nothing else. Needs jinja2 and matplotlib."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from archipel.compression.pages import write_page
from archipel.compression.plots import bars, trade
from archipel.compression.report import Report
from archipel.compression.search.result import SearchResult

_MOST = 400
"""Most rows of a table of a part's notes: the page of a network with thousands of layers must still open."""


def write_report(report: Report, path: str | os.PathLike[str], title: str = "compression") -> None:
    """Write what `compress` returned as a page: a table and bars of all parts, the notes of each. Raises OSError."""
    names = ["before", *(f"{number} {step.part.partition('(')[0]}" for number, step in enumerate(report.steps, 1))]
    measured = [report.before, *(step.after for step in report.steps)]
    notes = [(step, [_note(name, value) for name, value in step.facts.items()]) for step in report.steps]
    write_page(Path(path), "compress.html", title=title, report=report, rows=list(zip(names, measured)), notes=notes,
               plot=bars(names, measured))  # fmt: skip


def write_search_report(result: SearchResult, path: str | os.PathLike[str], title: str = "search") -> None:
    """Write what `search` returned as a page: the verdict, Pareto plots, all points with recipes. Raises OSError."""
    plots = []
    if result.points:
        plots = [
            trade(result, "size", "kB of the ONNX file"),
            trade(result, "latency", "latency, of the original's (batch 1, 1 thread)"),
            trade(result, "flops", "MFLOPs per example"),
        ]
    rows = result.to_dict()["points"]
    meeting, front = set(result.meeting), {cost: set(result.front(cost)) for cost in ("size", "latency")}
    write_page(Path(path), "search.html", title=title, r=result, rows=list(zip(result.points, rows)), plots=plots,
               meeting=meeting, front=front)  # fmt: skip


def _note(name: str, value: Any) -> dict[str, Any]:
    """A fact of a part for the template: text, or a table with a row for each layer."""
    if not isinstance(value, Mapping) or not value:
        return {"name": name, "text": _text(value), "columns": [], "rows": [], "left_out": 0}
    if all(isinstance(each, Mapping) for each in value.values()):
        columns = list(dict.fromkeys(column for each in value.values() for column in each))
        rows = [[str(layer), *(_text(each.get(column, "")) for column in columns)] for layer, each in value.items()]
    else:
        columns = [""]
        rows = [[str(layer), _text(each)] for layer, each in value.items()]
    left_out = max(len(rows) - _MOST, 0)
    return {"name": name, "text": "", "columns": columns, "rows": rows[:_MOST], "left_out": left_out}


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.5g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {_text(each)}" for name, each in value.items()) or "none"
    if isinstance(value, list | tuple):
        return ", ".join(map(_text, value)) or "none"
    return str(value)
