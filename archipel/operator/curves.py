"""The curves of a task: the metrics of its rounds as CSV, as a plot, and for TensorBoard."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from archipel.durable import write_durably
from archipel.errors import ClientError, MissingExtraError
from archipel.protocol.operator.registry import RoundMetrics
from archipel.protocol.operator.results import Distribution

Spread = Sequence[tuple[int, Distribution]]
PLOT_SUFFIXES = (".png", ".svg", ".pdf")
_WIDE = 100
FIGURES: Mapping[str, Callable[[Distribution], float]] = {
    "mean over devices": lambda each: each.mean.value,
    "worst 10%": lambda each: each.worst.value,
    "decile 1": lambda each: each.deciles[0].value,
    "median": lambda each: each.deciles[4].value,
    "decile 9": lambda each: each.deciles[8].value,
}
"""What is told of a distribution over devices in columns and curves."""
CLIPPED_SHARE = "clipped share"
"""The name of the curve with the share of the devices whose update was clipped."""


def curves(rounds: Sequence[RoundMetrics]) -> dict[str, list[tuple[int, float]]]:
    """The points (number of the round, value) of each metric by its name, of the share of clipped updates, and of
    figures of each distribution over devices, such as "evaluation accuracy worst 10%"."""
    points: dict[str, list[tuple[int, float]]] = {}
    for each in rounds:
        for name, value in _values(each).items():
            points.setdefault(name, []).append((each.number, value))
    return points


def write_csv(rounds: Sequence[RoundMetrics], file: Path) -> None:
    """One line a round: its number, end (Unix seconds), seconds, devices, clip, and a column for each metric."""
    names = list(curves(rounds))
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(["round", "ended", "seconds", "devices", "clip", *names])
    for each in rounds:
        values = _values(each)
        head = [each.number, each.ended, round(each.ended - each.started, 3), each.devices]
        lines.writerow([*head, "" if each.clip is None else each.clip, *(values.get(name, "") for name in names)])
    write_durably(file, text.getvalue().encode(), 0o666)


def plot(rounds: Sequence[RoundMetrics], file: Path) -> None:
    """A picture of `curves`, see `draw`.

    Raises ClientError for another suffix, or where no round has a metric; MissingExtraError without matplotlib.
    """
    check_plot_name(file)
    spread: dict[str, list[tuple[int, Distribution]]] = {}
    for each in rounds:
        for name, distribution in each.distributions.items():
            spread.setdefault(name, []).append((each.number, distribution))
    figures = {f"{name} {figure}" for name in spread for figure in FIGURES}
    # The mean over the devices is another one than the mean over all examples, which is a curve of its own.
    bands = {f"devices' {name}": points for name, points in spread.items()}
    draw({name: points for name, points in _checked(rounds).items() if name not in figures}, file, bands)


def check_plot_name(file: Path) -> None:
    """Raise ClientError for a name of a plot that says no kind of picture."""
    if file.suffix.lower() not in PLOT_SUFFIXES:
        raise ClientError(f"{file}: the name of a plot must end in one of {', '.join(PLOT_SUFFIXES)}")


def draw(
    found: Mapping[str, Sequence[tuple[int, float]]], file: Path, spread: Mapping[str, Spread] | None = None
) -> None:
    """A picture (PNG, SVG or PDF, by the name of `file`) with losses above, other metrics below, then clipped shares.

    The axis of losses is logarithmic where one is more than a hundred times another.

    Arguments:
        found: points (number of the round, value) by the curve's name.
        file: is replaced.
        spread: distributions over devices (number of the round, distribution) by the curve's name: of each the mean,
            the worst tenth, and a band that has four fifths of the devices.

    Raises ClientError for another suffix, MissingExtraError without matplotlib.
    """
    check_plot_name(file)
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ModuleNotFoundError:
        raise MissingExtraError("matplotlib", "curves") from None
    bands = dict(spread or {})
    found = {**found, **{name: [(n, each.mean.value) for n, each in points] for name, points in bands.items()}}
    kinds: dict[str, dict[str, Sequence[tuple[int, float]]]] = {"loss": {}, "metric": {}, "share of devices": {}}
    for name, points in found.items():
        # What is 0 in most rounds would flatten an accuracy.
        kind = "loss" if name.endswith("loss") else "share of devices" if name.endswith(CLIPPED_SHARE) else "metric"
        kinds[kind][name] = points
    panels = [(kind, group) for kind, group in kinds.items() if group]
    # Wider by the legends, which stand beside the curves: inside they would hide some of them.
    figure = Figure(figsize=(10 if bands else 9, 3 * len(panels)), layout="constrained")
    for axes, (kind, group) in zip(figure.subplots(len(panels), squeeze=False, sharex=True)[:, 0], panels):
        for name, points in group.items():
            line = axes.plot(*zip(*points), marker="o", markersize=3, label=name)[0]
            if name in bands:
                _draw_band(axes, bands[name], name, line.get_color())
        values = [value for points in group.values() for _, value in points if math.isfinite(value)]
        axes.set_ylabel(kind if kind != "metric" or len(group) > 1 else next(iter(group)))
        if kind == "loss" and values and 0 < _WIDE * min(values) < max(values):
            # Else one loss that is far off, such as the first, flattens all others.
            axes.set_yscale("log")
        if kind == "share of devices":
            top = max(values, default=0.0) or 1.0
            axes.set_ylim(-0.02 * top, 1.05 * top)  # no share is below 0
        axes.grid(alpha=0.3)
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1), borderaxespad=0)
    axes.set_xlabel("round")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    data = io.BytesIO()
    figure.savefig(data, format=file.suffix.lower().removeprefix("."))
    write_durably(file, data.getvalue(), 0o666)


def _draw_band(axes: Any, points: Spread, name: str, colour: str) -> None:
    numbers = [number for number, _ in points]
    low, high = ([each.deciles[place].value for _, each in points] for place in (0, -1))
    if len(points) == 1:
        # A band of one point is a line, such as of a task that is an evaluation.
        axes.vlines(numbers, low, high, color=colour, alpha=0.3, linewidth=8)
    axes.fill_between(numbers, low, high, color=colour, alpha=0.15, label=f"{name}, decile 1 to 9")
    worst = [each.worst.value for _, each in points]
    axes.plot(numbers, worst, linestyle="--", marker="v", markersize=3, color=colour, label=f"{name}, worst 10%")


def write_tensorboard(rounds: Sequence[RoundMetrics], folder: Path) -> None:
    """An event file in `folder`, which `tensorboard --logdir FOLDER` shows: a scalar for each metric, steps are rounds.

    Raises ClientError where no round has a metric, or the folder has event files already; MissingExtraError without
    tensorboardX.
    """
    found = _checked(rounds)
    if any(folder.glob("events.out.tfevents.*")):
        raise ClientError(
            f"{folder}: has event files already, beside which the curves would be drawn twice; name another"
        )
    try:
        from tensorboardX import SummaryWriter
    except ModuleNotFoundError:
        raise MissingExtraError("tensorboardX", "curves") from None
    ended = {each.number: each.ended for each in rounds}
    # By a writer of its own, since the format is TensorBoard's. After a kill it can be made again, in another folder.
    with SummaryWriter(str(folder)) as writer:
        for name, points in found.items():
            for number, value in points:
                writer.add_scalar(name.replace(" ", "/"), value, number, walltime=ended[number])


def _checked(rounds: Sequence[RoundMetrics]) -> dict[str, list[tuple[int, float]]]:
    found = curves(rounds)
    if not found:
        raise ClientError(
            f"no curves: of {len(rounds)} committed rounds none has metrics; a bundle has them where it was converted "
            "with a loss_range, and not with noise"
        )
    return found


def _values(each: RoundMetrics) -> dict[str, float]:
    spread = {
        f"{name} {column}": figure(distribution)
        for name, distribution in each.distributions.items()
        for column, figure in FIGURES.items()
    }
    return {**each.metrics, **_clipped(each), **spread}


def _clipped(each: RoundMetrics) -> dict[str, float]:
    result = each.result
    if result is None or result.clipped is None or not result.devices:
        return {}
    return {CLIPPED_SHARE: result.clipped / result.devices}
