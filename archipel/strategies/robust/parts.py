"""A robust rule over the parts of a round: single updates of a plain round, or the sums of several secure groups.

A rule sees the mean of each part: its sum divided by its sum of weights. So a device with many examples counts like one
with few, and none gains by lying about its weight. The rule runs once for each kind of entry (deltas, values, running
statistics), whose sizes differ. Its aggregate times the cohort's sum of weights stands for the sum of the round; so the
strategy's server half, its bounds and the limits of steps stay what they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from archipel.bundle.roles import Update
from archipel.errors import PolicyError
from archipel.protocol.bounds import Group, entries, groups, sum_bound
from archipel.protocol.metrics.training_metrics import CLAMPED, DEVICES, TRAINING
from archipel.protocol.operator.aggregation import Aggregation
from archipel.protocol.vector import DecodedSum, Layout
from archipel.strategies.robust.registry import MIXERS, RULES
from archipel.strategies.robust.rule import ROOT, Row, Rows

_KINDS = {"delta": "deltas", "value": "values", "mean": "statistics", "variance": "statistics"}
_COPIES = 3
"""Of the updates in float64 at once: the rows, the mixed ones, and what a rule sorts."""


@dataclass(frozen=True)
class Part:
    """The sum of the updates of some devices, 1 or more, into which nobody looks."""

    total: DecodedSum
    devices: int

    def weight(self, port: Update) -> float:
        """What the entries of this port were multiplied with, summed over the devices."""
        if self.total.weight is None or port.weighting == "uniform":
            return float(self.devices)
        return self.total.weight


def aggregate_parts(
    parts: Sequence[Part],
    layout: Layout,
    settings: Aggregation,
    state: Mapping[str, Row],
    order: NDArray[np.int64],
    root: Part | None = None,
) -> tuple[DecodedSum, dict[str, Row]]:
    """What a rule makes of a round, as a sum of all of its devices.

    Arguments:
        parts: at least as many as the rule needs to tolerate `settings.tolerated` of them.
        layout: of the uploads, with the metrics; these are summed, for they move no model.
        settings: with a rule.
        state: as the last round's call returned it; {} in the first round.
        order: a permutation of the parts, for bucketing.
        root: the update that the server made of examples of its own, where the rule takes one.

    Returns the sum, which `layout.check_sum` accepts where every part is one of devices that keep to their program, and
    the next state.

    Raises PolicyError for too few parts.
    """
    total = _plain_sum(parts, layout)
    devices = sum(part.devices for part in parts)
    kept: dict[str, Row] = {}
    sums: dict[str, NDArray[np.float64]] = {}
    for kind, ports in ports_by_kind(layout).items():
        prefix = f"{kind}/"
        before = {name.removeprefix(prefix): row for name, row in state.items() if name.startswith(prefix)}
        if root is not None:
            before[ROOT] = means([root], ports)[0]
        row, after = aggregate_rows(means(parts, ports), settings, before, order)
        kept |= {prefix + name: value for name, value in after.items()}
        start, whole = 0, Part(total, devices)
        for port in ports:
            stop = start + entries(port)
            sums[port.name] = row[start:stop].reshape(tuple(map(int, port.shape))) * whole.weight(port)
            start = stop
    for port in layout.updates:
        sums.setdefault(port.name, total.read(port))
    for group in groups(layout.updates):
        _keep_to_bound(group, layout, sums, devices, 0.0 if total.weight is None else total.weight)
    return DecodedSum.of({port: sums[port.name] for port in layout.updates}), kept


def aggregate_rows(
    rows: Rows, settings: Aggregation, state: Mapping[str, Row], order: NDArray[np.int64]
) -> tuple[Row, dict[str, Row]]:
    """Mixing, where there is one, and the rule. Raises PolicyError for too few rows."""
    if settings.mixing:
        rows = MIXERS[settings.mixing](rows, settings.tolerated, order)
    return RULES[settings.rule](rows, settings.tolerated, state)


def ports_by_kind(layout: Layout) -> dict[str, list[Update]]:
    """The entries that move the model, by what a rule runs over at once; the weight and metrics are not among them."""
    found: dict[str, list[Update]] = {}
    for port in layout.updates:
        if port.kind in _KINDS and not port.name.startswith((TRAINING, CLAMPED, DEVICES)):
            found.setdefault(_KINDS[port.kind], []).append(port)
    return found


def means(parts: Sequence[Part], ports: Sequence[Update]) -> Rows:
    """For each part the mean over its devices, `[parts, entries of the ports]`."""
    rows = np.zeros((len(parts), sum(map(entries, ports))))
    for row, part in zip(rows, parts):
        start = 0
        for port in ports:
            stop, weight = start + entries(port), part.weight(port)
            # A weight that was rounded to 0 leaves the update at 0, too.
            if weight > 0:
                np.divide(part.total.read(port).reshape(-1), weight, out=row[start:stop], dtype=np.float64)
            start = stop
    return rows


def add_parts(parts: Sequence[Part], layout: Layout) -> DecodedSum:
    """The sum of the parts."""
    return DecodedSum.of(
        {port: np.asarray(sum(part.total.read(port) for part in parts), np.float64) for port in layout.updates}
    )


def check_memory(settings: Aggregation, parts: int, layout: Layout) -> None:
    """Raises PolicyError where the updates of so many parts take more memory than the settings allow."""
    needed = parts * layout.length * (np.float32().nbytes + _COPIES * np.float64().nbytes)
    if needed > settings.most_bytes:
        raise PolicyError(
            f"aggregation {settings.rule!r}: {parts} updates of {layout.length:,} entries take {needed:,} bytes, more "
            f"than most_bytes, {settings.most_bytes:,}; make the cohort smaller, or form groups"
        )


def _plain_sum(parts: Sequence[Part], layout: Layout) -> DecodedSum:
    """Of metrics and weights, which are all that is read of it; the other entries are those of the first part."""
    kinds = {port.name for ports in ports_by_kind(layout).values() for port in ports}
    summed: dict[Update, NDArray[np.float64]] = {}
    for port in layout.updates:
        if port.name in kinds:
            summed[port] = parts[0].total.read(port)
        else:
            summed[port] = np.sum([part.total.read(port) for part in parts], axis=0, dtype=np.float64)
    return DecodedSum.of(summed)


def _keep_to_bound(
    group: Group, layout: Layout, sums: dict[str, NDArray[np.float64]], devices: int, weight: float
) -> None:
    """A median by coordinates may be longer than each update: that of (0, 1, 1), (1, 0, 1), (1, 1, 0) is (1, 1, 1)."""
    size, bound = group.measure(sums), sum_bound(layout.updates, group, devices, weight)
    if size > bound:
        for port in group.ports:
            sums[port.name] = sums[port.name] * (bound / size)
