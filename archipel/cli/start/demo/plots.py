"""The report's plots, as SVG text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from archipel.cli.start.demo.results import DeviceRow, ModelScore, Results, RoundRow
from archipel.compression.plots import style_axes, svg_text

BLUE, ORANGE, GREEN, GREY, RED = "#2563a8", "#d9822b", "#2f8f5b", "#9aa3ad", "#b83b3b"
PHASES = ("assigning", "advertising", "sharing", "complaining", "masking", "confirming", "unmasking")


def accuracy_per_round(results: Results) -> str:
    figure, axes = _axes(7.2, 3.4)
    measured = [(row.number, 100 * row.accuracy) for row in results.rounds if row.accuracy is not None]
    cloud = 100 * results.score("cloud").accuracy
    numbers, accuracies = zip((0, cloud), *measured)
    axes.plot(numbers, accuracies, "o-", color=BLUE, label="federated model")
    axes.axhline(cloud, color=GREY, linestyle="--", label="cloud model")
    axes.set_xticks(numbers)
    axes.set_xlabel("round")
    axes.set_ylabel("accuracy on held-out pupils, %")
    axes.legend(frameon=False, loc="center right")
    return svg_text(figure)


def gains(results: Results) -> str:
    """Each paired difference with its interval."""
    compared = [s for s in (*results.scores, *results.halves) if s.interval is not None]
    figure, axes = _axes(7.2, 0.9 + 0.5 * len(compared))
    for place, score in enumerate(reversed(compared)):
        interval = score.interval
        if interval is not None:
            # Green and red where the interval excludes zero, grey where the difference may be chance.
            color = GREEN if interval.low > 0 else RED if interval.high < 0 else GREY
            axes.plot([interval.low, interval.high], [place, place], color=color, linewidth=3)
            axes.plot(interval.difference, place, "o", color=color)
    axes.axvline(0, color="#333", linewidth=1)
    axes.set_yticks(range(len(compared)), [_comparison(s, results) for s in reversed(compared)])
    axes.set_ylim(-0.6, len(compared) - 0.4)
    axes.set_xlabel("difference in accuracy, points, with 95% interval over writers")
    return svg_text(figure)


def _comparison(score: ModelScore, results: Results) -> str:
    where = " (halves)" if score in results.halves else ""
    return f"{score.name} - {score.against}{where}"


def per_writer(results: Results) -> str:
    """Every held-out pupil: federated against cloud."""
    figure, axes = _axes(4.6, 4.2)
    cloud, federated = (100 * results.score(name).per_writer for name in ("cloud", "federated"))
    low = min(cloud.min(), federated.min()) - 2
    axes.plot([low, 101], [low, 101], color=GREY, linewidth=1)
    axes.scatter(cloud, federated, s=16, color=BLUE, alpha=0.6, linewidths=0)
    axes.set_xlim(low, 101)
    axes.set_ylim(low, 101)
    axes.set_xlabel("cloud model, % of the writer's digits")
    axes.set_ylabel("federated model, %")
    return svg_text(figure)


def training(results: Results) -> str:
    figure, axes = _axes(7.2, 3.0)
    numbers = [epoch.number for epoch in results.epochs]
    axes.plot(numbers, [epoch.train_loss for epoch in results.epochs], color=ORANGE, label="training")
    axes.plot(numbers, [epoch.validation_loss for epoch in results.epochs], color=BLUE, label="validation")
    best = [epoch for epoch in results.epochs if epoch.best][-1]
    axes.plot(best.number, best.validation_loss, "o", color=BLUE)
    axes.set_yscale("log")
    axes.set_xlabel("epoch")
    axes.set_ylabel("cross entropy, nats")
    axes.legend(frameon=False)
    return svg_text(figure)


def bytes_per_device(fleet: Sequence[DeviceRow]) -> str:
    figure, axes = _axes(7.2, 3.0)
    places = np.arange(len(fleet))
    sent = np.array([device.sent for device in fleet]) / 1e3
    received = np.array([device.received for device in fleet]) / 1e3
    axes.bar(places, received, color=GREY, label="received")
    axes.bar(places, sent, bottom=received, color=BLUE, label="sent")
    axes.set_xticks(places, [device.name for device in fleet], rotation=90, fontsize=6)
    axes.set_ylabel("kB over all rounds")
    axes.legend(frameon=False, ncols=2, loc="lower left", bbox_to_anchor=(0, 1))
    return svg_text(figure)


def participation(fleet: Sequence[DeviceRow], rounds: Sequence[RoundRow]) -> str:
    """Devices by rounds: who was in the sum, and where the others left."""
    grid = np.array([[_stage(word) for word in device.furthest] for device in fleet], dtype=float)
    figure, axes = _axes(1.6 + 0.45 * len(rounds), 0.8 + 0.17 * len(fleet))
    colors = ListedColormap(["#eceff2", RED, ORANGE, BLUE])
    axes.imshow(grid, cmap=colors, vmin=0, vmax=3, aspect="auto", interpolation="nearest")
    axes.set_xticks(range(len(rounds)), [str(row.number) for row in rounds])
    axes.set_yticks(range(len(fleet)), [device.name for device in fleet], fontsize=6)
    axes.set_xlabel("round")
    axes.grid(visible=False)
    return svg_text(figure)


def metric_curves(found: Mapping[str, Sequence[tuple[int, float]]]) -> str:
    """The metrics of a task's rounds: losses on the left, the others on the right. Empty where there are none."""
    losses = {name: points for name, points in found.items() if name.endswith("loss")}
    panels = [group for group in (losses, {n: p for n, p in found.items() if n not in losses}) if group]
    if not panels:
        return ""
    figure = Figure(figsize=(7.2, 3.0), layout="constrained")
    for axes, group in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        style_axes(axes)
        for color, (name, points) in zip((BLUE, ORANGE, GREEN, RED), group.items(), strict=False):
            axes.plot(*zip(*points, strict=True), "o-", color=color, markersize=3, label=name)
        axes.set_xlabel("round")
        axes.legend(frameon=False)
    return svg_text(figure)


def _stage(furthest: str) -> int:
    """0 not in the round, 1 left before its update was in, 2 left afterwards, 3 stayed to the end."""
    if furthest not in PHASES:
        return 0
    return 1 if PHASES.index(furthest) < PHASES.index("masking") else 3 if furthest == PHASES[-1] else 2


def _axes(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    style_axes(axes)
    return figure, axes


def all_plots(results: Results) -> dict[str, str]:
    return {
        "accuracy": accuracy_per_round(results),
        "gains": gains(results),
        "per_writer": per_writer(results),
        "training": training(results),
        "curves": metric_curves(results.curves),
        "bytes": bytes_per_device(results.fleet),
        "participation": participation(results.fleet, results.rounds),
    }
