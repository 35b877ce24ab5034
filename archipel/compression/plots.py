"""Plots of compression's reports, as SVG text. Needs matplotlib."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from archipel.compression.report import Measured
from archipel.compression.search.point import Metrics, Point
from archipel.compression.search.result import COSTS, SearchResult

_FEW = 8  # up to so many points all are in the plot
BLUE, ORANGE, GREEN, GREY = "#2563a8", "#d9822b", "#2f8f5b", "#9aa3ad"


def bars(names: Sequence[str], measured: Sequence[Measured]) -> str:
    """Bytes, MFLOPs and, if measured, accuracy of the model before and after each part."""
    shown: list[tuple[str, Callable[[Measured], float]]] = [
        ("kB", lambda m: m.nbytes / 1e3),
        ("kB, zipped", lambda m: m.zipped / 1e3),
        ("MFLOPs", lambda m: m.flops / 1e6),
    ]
    if all(m.accuracy is not None for m in measured):
        shown.append(("accuracy, %", lambda m: 100 * (m.accuracy or 0.0)))
    figure = Figure(figsize=(2.4 * len(shown) + 1.6, 0.8 + 0.32 * len(names)), layout="constrained")
    places = range(len(names))
    for axes, (title, value) in zip(figure.subplots(1, len(shown), sharey=True, squeeze=False)[0], shown):
        style_axes(axes)
        values = [value(m) for m in measured]
        drawn = axes.barh(places, values, color=[GREY] + [BLUE] * (len(names) - 1))
        axes.bar_label(drawn, [f"{each:,.4g}" for each in values], padding=2, fontsize=8)
        axes.set_xlim(0, 1.35 * max(*values, 1e-9))
        axes.set_yticks(places, names)
        axes.set_title(title, fontsize=10)
    figure.axes[0].invert_yaxis()
    return svg_text(figure)


def trade(result: SearchResult, cost: str, label: str) -> str:
    """Every point's quality over "size", "latency" or "flops", the Pareto front as a line.

    Points on the front or within the target are numbered; the worst quarter may lie outside the plot.
    """
    value: Callable[[Metrics], float] = COSTS[cost]
    scale = {"size": 1e-3, "flops": 1e-6}.get(cost, 1.0)
    accuracy = result.original.accuracy is not None

    def place(metrics: Metrics) -> tuple[float, float]:
        return scale * value(metrics), 100 * metrics.quality if accuracy else metrics.loss

    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    axes = figure.add_subplot()
    style_axes(axes)
    front = result.front(cost)
    axes.plot(*zip(*(place(point.metrics) for point in front)), "-", color=GREY, label="Pareto front", zorder=1)
    meeting = result.meeting
    others = [point for point in result.points if point not in meeting]
    for points, color, name in ((others, ORANGE, "misses the target"), (meeting, GREEN, "meets the target")):
        if points:
            xs, ys = zip(*(place(p.metrics) for p in points))
            axes.scatter(xs, ys, s=28, color=color, label=name, zorder=2)
    x, y = place(result.original)
    axes.scatter([x], [y], s=46, marker="D", color=BLUE, label="original", zorder=3)
    bounds: list[float] = []
    for condition in result.target.conditions:
        bound = condition.bound(result.original)
        if condition.quantity == "accuracy":
            bounds.append(100 * bound)
            axes.axhline(100 * bound, color=GREY, linestyle=":", linewidth=1)
        elif condition.quantity == cost and (cost != "latency" or condition.kind == "ratio"):
            axes.axvline(scale * bound, color=GREY, linestyle=":", linewidth=1)
    if len(result.points) > _FEW:
        # A few recipes that ruin the model would leave no room for those that matter.
        heights = sorted((place(point.metrics)[1] for point in result.points), reverse=not accuracy)
        needed = [heights[len(heights) // 4], heights[-1], y, *bounds, *(place(point.metrics)[1] for point in meeting)]
        room = 0.08 * (max(needed) - min(needed)) or 1.0
        axes.set_ylim(min(needed) - room, max(needed) + room)
    if accuracy:
        axes.set_ylim(top=min(axes.get_ylim()[1], 100.5))
    for point in _thin_out([*front, *meeting], place, axes):
        axes.annotate(str(point.number), place(point.metrics), xytext=(4, 4), textcoords="offset points", fontsize=8,
                      annotation_clip=True)  # fmt: skip
    axes.set_xlabel(label)
    axes.set_ylabel("accuracy on the validation data, %" if accuracy else "loss on the validation data")
    if not accuracy:
        axes.invert_yaxis()
    axes.legend(frameon=False, loc="best")
    return svg_text(figure)


def _thin_out(points: Sequence[Point], place: Callable[[Metrics], tuple[float, float]], axes: Axes) -> list[Point]:
    """One of the points in each cell of the page, so that numbers do not overlap."""
    chosen: dict[tuple[int, int], Point] = {}
    for point in points:
        x, y = axes.transData.transform(place(point.metrics))
        chosen.setdefault((round(x / 18), round(y / 12)), point)
    return list(chosen.values())


def style_axes(axes: Axes) -> None:
    """The look of all plots: two sides of the frame, and a pale grid behind the data."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(visible=True, color="#e6e9ec", linewidth=0.8)
    axes.set_axisbelow(True)


def svg_text(figure: Figure) -> str:
    """The figure as an <svg> element, to be put into a page."""
    buffer = io.StringIO()
    # Text stays text, so that it can be searched and copied; the salt makes equal plots equal files.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "archipel", "font.family": "sans-serif"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]
