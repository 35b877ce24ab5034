"""What a split over devices looks like: sizes, labels, how far devices are from the whole; as a table and a picture."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from archipel.datasets.label_partitions import check_labels
from archipel.durable import write_durably
from archipel.errors import DatasetError, MissingExtraError

PLOT_SUFFIXES = (".png", ".svg", ".pdf")
_MOST_NAMED = 12
_MOST_APART = 60


@dataclass(frozen=True)
class PartsSummary:
    """Of a split: how many examples, labels and how much of another mixture each device has.

    Arguments:
        names: the labels, ascending `[labels]`.
        counts: examples of each device and label `[devices, labels]`.

    Example: see `archipel.datasets.describe_parts`.
    """

    names: NDArray[Any]
    counts: NDArray[np.int64]

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Examples of each device `[devices]`."""
        return np.asarray(self.counts.sum(axis=1))

    @property
    def labels(self) -> NDArray[np.int64]:
        """How many different labels each device has `[devices]`."""
        return np.asarray((self.counts > 0).sum(axis=1))

    @property
    def distances(self) -> NDArray[np.float64]:
        """The total variation distance, 0 to 1, from each device's shares of labels to those of all devices together
        `[devices]`; NaN for a device without examples."""
        with np.errstate(invalid="ignore"):
            shares = self.counts / self.sizes[:, None]
        whole = self.counts.sum(axis=0) / max(int(self.counts.sum()), 1)
        return np.asarray(np.abs(shares - whole).sum(axis=1) / 2)

    @property
    def mean_distance(self) -> float:
        """The mean of `distances` over the devices that have examples."""
        return float(np.nanmean(self.distances))

    def __str__(self) -> str:
        rows: list[tuple[str, NDArray[Any], str]] = [
            ("examples", self.sizes, "{:.0f}"),
            ("labels", self.labels, "{:.0f}"),
        ]
        rows.append(("distance to the whole", self.distances[self.sizes > 0], "{:.3f}"))
        head = f"{len(self.counts)} devices, {self.counts.sum()} examples, {len(self.names)} labels"
        lines = [head, f"{'a device':22}{'least':>10}{'median':>10}{'mean':>10}{'most':>10}"]
        for name, values, form in rows:
            mean = form if form != "{:.0f}" else "{:.1f}"
            cells = [(form, values.min()), (form, np.median(values)), (mean, values.mean()), (form, values.max())]
            lines.append(f"{name:22}" + "".join(f"{each.format(value):>10}" for each, value in cells))
        return "\n".join(lines)

    def plot(self, file: Path | str) -> None:
        """A picture (PNG, SVG or PDF, by the name of `file`): a bar for each device, its labels on top of each other.

        Raises DatasetError for another suffix, MissingExtraError without matplotlib.
        """
        path = Path(file)
        kind = path.suffix.lower()
        if kind not in PLOT_SUFFIXES:
            raise DatasetError(f"{path}: the name of a plot must end in one of {', '.join(PLOT_SUFFIXES)}")
        try:
            from matplotlib import colormaps
            from matplotlib.figure import Figure
            from matplotlib.ticker import MaxNLocator
        except ModuleNotFoundError:
            raise MissingExtraError("matplotlib", "curves") from None
        figure = Figure(figsize=(8, 4), layout="constrained")
        axes = figure.subplots()
        devices, labels = self.counts.shape
        colors = (
            colormaps["tab20" if labels > 10 else "tab10"] if labels <= 20 else colormaps["viridis"].resampled(labels)
        )
        # Gaps between bars of a few pixels would only flicker.
        under, width = np.zeros(devices), 0.9 if devices <= _MOST_APART else 1.0
        for label in range(labels):
            axes.bar(
                np.arange(devices), self.counts[:, label], bottom=under, width=width, color=colors(label),
                label=str(self.names[label]),
            )  # fmt: skip
            under += self.counts[:, label]
        axes.set_xlabel("device")
        axes.set_ylabel("examples")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.margins(x=0.01)
        more = "" if labels <= _MOST_NAMED else f"; {labels} labels, the first ones below"
        axes.set_title(f"mean distance to the whole: {self.mean_distance:.3f}{more}", fontsize="medium")
        if labels <= _MOST_NAMED:
            axes.legend(title="label", loc="center left", bbox_to_anchor=(1, 0.5), fontsize="small")
        data = io.BytesIO()
        figure.savefig(data, format=kind.removeprefix("."))
        write_durably(path, data.getvalue(), 0o666)


def describe_parts(parts: Sequence[NDArray[np.integer[Any]]], labels: NDArray[Any]) -> PartsSummary:
    """Say what each device of a split has.

    Arguments:
        parts: each device's rows, as `split_dirichlet` and its like return them.
        labels: the label of each example `[examples]`, numbers or text.

    Raises DatasetError for no parts, and for rows that there are not.

    Example:
        parts = split_shards(labels, 100)
        print(describe_parts(parts, labels))
        describe_parts(parts, labels).plot("parts.png")
    """
    check_labels("parts", labels)
    if not parts:
        raise DatasetError("parts: there are none; give the rows of at least one device")
    names, member = np.unique(labels, return_inverse=True)
    counts = np.zeros((len(parts), len(names)), np.int64)
    for number, rows in enumerate(parts):
        if len(rows) and not 0 <= rows.min() <= rows.max() < len(labels):
            raise DatasetError(f"parts: device {number} has a row that is not from 0 to {len(labels) - 1}")
        if len(rows):
            counts[number] = np.bincount(member[rows], minlength=len(names))
    return PartsSummary(names, counts)
