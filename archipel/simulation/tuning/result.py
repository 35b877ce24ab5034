"""What a tuning found: its trials, the best of them, and pictures of both."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from archipel.durable import write_durably
from archipel.errors import MissingExtraError, SimulationError
from archipel.simulation.tuning.settings import Range, TuneSettings, Value

_COLUMNS = 3


@dataclass(frozen=True)
class Trial:
    """One run. `value`: the metric after `rounds` rounds; None where it has none, or none that is a finite number.

    `state`: "complete" ran to the end, "pruned" was ended early, "running" was stopped and goes on with the next call.
    """

    number: int
    values: Mapping[str, Value]
    rounds: int
    value: float | None
    state: Literal["complete", "pruned", "running"]


@dataclass(frozen=True)
class Tuning:
    """The result of `tune`.

    Attributes:
        settings: what was asked for.
        metric: the metric that decided.
        lower: whether its lower value is the better one.
        trials: oldest first.

    Example: see `archipel.simulation.tune`.
    """

    settings: TuneSettings
    metric: str
    lower: bool
    trials: list[Trial] = field(repr=False)

    @property
    def best(self) -> Trial:
        """The best of the trials that ran to the end. Raises SimulationError where none has a number."""
        found = [trial for trial in self.trials if trial.state == "complete" and trial.value is not None]
        if not found:
            raise SimulationError(
                f"tune: no trial ran to its end with a finite {self.metric}; give smaller values, such as of lr"
            )
        return (min if self.lower else max)(found, key=lambda trial: trial.value or 0.0)

    @property
    def rounds(self) -> int:
        """The rounds of all trials together."""
        return sum(trial.rounds for trial in self.trials)

    def plot(self, path: Path | str) -> None:
        """Draw the metric of each trial in their order with the best so far, and the metric against every setting.

        Arguments:
            path: a .png, .svg or .pdf, which is replaced. Trials that were ended early are hollow.

        Raises ClientError for another name, MissingExtraError without `archipel[tuning]`, SimulationError without
        trials.
        """
        from archipel.operator.curves import check_plot_name

        path = Path(path)
        check_plot_name(path)
        try:
            from matplotlib.figure import Figure
            from matplotlib.ticker import MaxNLocator
        except ModuleNotFoundError:
            raise MissingExtraError("matplotlib", "tuning") from None
        shown = [trial for trial in self.trials if trial.value is not None]
        if not shown:
            raise SimulationError(f"tune: no trial has a finite {self.metric} to draw")
        names = list(self.settings.ranges)
        columns = min(_COLUMNS, len(names) + 1)
        rows = math.ceil((len(names) + 1) / columns)
        figure = Figure(figsize=(3.6 * columns, 2.8 * rows + 0.3), layout="constrained")
        panels = figure.subplots(rows, columns, squeeze=False).ravel()
        self._draw(panels[0], [float(trial.number) for trial in shown], shown)
        self._draw_best(panels[0])
        panels[0].set(xlabel="trial", ylabel=self.metric)
        panels[0].xaxis.set_major_locator(MaxNLocator(integer=True))
        for axes, name in zip(panels[1:], names):
            asked = self.settings.ranges[name]
            given = [trial.values[name] for trial in shown]
            if not isinstance(asked, Range):
                # At their places in the list, and not in the order in which trials met them.
                given = [asked.index(each) for each in given]
                axes.set_xticks(range(len(asked)), [str(each) for each in asked])
                axes.set_xlim(-0.5, len(asked) - 0.5)
            elif asked.log:
                mark_log(axes, asked.low, asked.high)
            elif asked.whole:
                axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            self._draw(axes, given, shown)
            axes.set(xlabel=name, ylabel=self.metric)
        for axes in panels[len(names) + 1 :]:
            axes.set_visible(False)
        # Above the panels, where it hides no trial.
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper left", ncols=3)
        data = io.BytesIO()
        figure.savefig(data, format=path.suffix.lower().removeprefix("."))
        write_durably(path, data.getvalue(), 0o666)

    def _draw(self, axes: Any, places: list[Any], shown: list[Trial]) -> None:
        axes.grid(alpha=0.3)
        for label, colour, complete in (("ran to the end", "C0", True), ("ended early", "none", False)):
            these = [
                (place, trial.value) for place, trial in zip(places, shown) if (trial.state == "complete") == complete
            ]
            if these:
                axes.scatter(*zip(*these), s=18, c=colour, edgecolors="C0", label=label)

    def _draw_best(self, axes: Any) -> None:
        """The best of the trials that ran to the end so far, up to the last trial."""
        best: list[tuple[int, float]] = []
        for trial in self.trials:
            if trial.state == "complete" and trial.value is not None:
                before = best[-1][1] if best else trial.value
                best.append((trial.number, (min if self.lower else max)(before, trial.value)))
        if best:
            best.append((self.trials[-1].number, best[-1][1]))
            axes.step(*zip(*best), where="post", color="C1", label="best so far")


def mark_log(axes: Any, low: float, high: float) -> None:
    """Give the panel a logarithmic x-axis from low to high, with as many numbers below as stand side by side."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    decades = math.log10(high / low)
    axes.set_xscale("log")
    axes.set_xlim(low / 10 ** (decades / 20), high * 10 ** (decades / 20))
    if decades < 1:  # powers of ten, or even their halves and fifths, may all lie outside
        axes.xaxis.set_major_locator(MaxNLocator(4))
    else:
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if decades < 2 else (1,), numticks=6))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda place, _: f"{place:g}"))
    # Matplotlib writes numbers at the minor marks too where there are few major ones, one over the other.
    axes.xaxis.set_minor_formatter(NullFormatter())
