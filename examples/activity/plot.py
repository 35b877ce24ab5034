"""Everybody's accuracy with each model, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from results import Run

COLORS = {"cloud": "#9aa3ad", "federated": "#2563a8", "personalised": "#2f8f5b"}


def draw_people(runs: Sequence[Run], path: Path) -> None:
    """A line for each person, worst cloud model below; means over the runs. The format is that of the file's name."""
    people = runs[0].people
    means = {model: 100 * np.mean([run.accuracies(model) for run in runs], axis=0) for model in COLORS}
    order = np.argsort(means["cloud"])
    places = np.arange(len(order))
    figure = Figure(figsize=(7.2, 0.8 + 0.2 * len(order)), layout="constrained")
    axes = figure.add_subplot()
    ends = np.stack([values[order] for values in means.values()])
    axes.hlines(places, ends.min(axis=0), ends.max(axis=0), color="#e0e4e8", linewidth=3)
    for model, color in COLORS.items():
        axes.plot(means[model][order], places, "o", color=color, markersize=5, label=model)
        axes.axvline(means[model].mean(), color=color, linewidth=1, linestyle="--")
    names = [f"{people[at].person}{' (new)' if people[at].group == 'newcomer' else ''}" for at in order]
    axes.set_yticks(places, names, fontsize=7)
    axes.set_ylabel("person")
    axes.set_xlabel("accuracy on the person's own later windows, %; dashed: mean person")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, ncols=3, loc="lower left", bbox_to_anchor=(0, 1))
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
