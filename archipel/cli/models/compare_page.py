"""The page that `archipel compare --html` writes: a bar chart and the table, in one file that loads nothing else."""

from __future__ import annotations

import math
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from archipel.cli.models.compare import decibels, summary
from archipel.compression import pages
from archipel.compression.compare import Comparison, Row
from archipel.compression.plots import svg_text

_BLUE, _RED, _GREY = "#2563a8", "#b83b3b", "#9aa3ad"
_NAME = 48


def write_page(result: Comparison, a: str, b: str, path: Path) -> None:
    """Write the page, whole or not at all. `a` and `b` are the models' names. Raises OSError."""
    pages.write_page(
        path, "compare.html", title=f"{b} against {a}", r=result, b=b, lines=summary(result), plot=plot(result),
        db=decibels,
    )  # fmt: skip


def plot(result: Comparison) -> str:
    """A bar for each value in the order of graph a, as SVG text; values that are equal reach to the right edge."""
    rows = sorted((row for row in result.rows if row.snr_db is not None), key=lambda row: row.position)
    finite = [row.snr_db for row in rows if row.snr_db is not None and math.isfinite(row.snr_db)]
    # The right edge lies beyond the threshold and all finite ratios, so that bars of equal values are the longest.
    edge = max([result.threshold * 1.5, 10.0, *finite]) * 1.05
    figure = Figure(figsize=(9, 1.2 + 0.24 * max(len(rows), 1)), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    places = range(len(rows))
    axes.barh(places, [_length(row, edge) for row in rows], color=[_color(row, result.threshold) for row in rows])
    # Without parse_math=False a name with dollar signs would be set as a formula.
    axes.set_yticks(places, [_label(row) for row in rows], fontsize=7, parse_math=False)
    axes.invert_yaxis()
    axes.axvline(result.threshold, color="#333", linewidth=1, linestyle="--")
    axes.set_xlim(min(0.0, *finite) if finite else 0.0, edge)
    axes.set_xlabel("signal to noise, dB")
    keys = [Patch(color=color, label=text) for color, text in ((_BLUE, "above"), (_RED, "diverged"), (_GREY, "equal"))]
    axes.legend(handles=keys, frameon=False, fontsize=8, ncols=3, loc="lower right", bbox_to_anchor=(1, 1))
    return svg_text(figure)


def _length(row: Row, edge: float) -> float:
    return max(-edge, min(edge, row.snr_db or 0.0))


def _color(row: Row, threshold: float) -> str:
    if row.snr_db == math.inf:
        return _GREY
    return _RED if row.snr_db is not None and row.snr_db < threshold else _BLUE


def _label(row: Row) -> str:
    name = row.layer or row.name
    return name if len(name) <= _NAME else "..." + name[-_NAME:]
