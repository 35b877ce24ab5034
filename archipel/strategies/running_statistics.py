"""Running statistics of BatchNormalization in a federation: how devices send them, and how the server combines them.

A round starts with mean m and variance v of a channel. Device k ends it with m_k and v_k. Times its weight it uploads

    d_k = (m_k - m) / s        s_k = (v_k - v) / s^2 + d_k^2        where s^2 = v + FLOOR

With D and S the weighted means over the cohort, the server's m + s D and v + s^2 (S - D^2) are mean and variance of all
the devices' examples together, by the law of total variance: exactly, however far apart the devices' means are.

In units of s one range fits every channel of every layer, and the fixed-point encoding has the same relative precision
for a variance of 10^-4 as for one of 10^4. An entry beyond its range is clamped. As entries are changes, what a clamp
has cut off is in the next round's entry: with `statistics_range` 3 a variance can become ten times as large in a round,
or a tenth. Where D is near the range, most devices are farther away than that, and the server leaves D^2 out: the unit
grows with the distance, so that a few rounds reach any mean.

The deltas' clip has no part in this, and the server's rate does not scale it: statistics are measured, and no steps of
a descent. In an asynchronous task a stale entry counts less, as a delta does.

The server half and the check of a device need NumPy only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from archipel.bundle import Manifest
from archipel.bundle.roles import Parameter, Start, Update
from archipel.errors import ConversionError, ProvenanceError
from archipel.protocol.vector import DecodedSum
from archipel.strategies.device import LocalTraining, RunningPair, Upload

if TYPE_CHECKING:
    from archipel.strategies.program import ProgramGraph

FLOOR = 1e-5
"""Added to a variance before it becomes a unit: the usual epsilon of BatchNormalization, below which a variance hardly
matters. So a channel that was constant can vary again."""
_NEAR = 0.9
"""The part of its range from which on a mean shift counts as cut off."""
_SLACK = 1e-3
"""The relative error that the checks of a device allow in each round for float32."""
_MANY = 1000
"""After so many rounds a mean may be anywhere, so that no more terms are summed up."""

Tensors = dict[str, np.ndarray]


@dataclass(frozen=True)
class Shared:
    """A pair that devices share: parameters by name, and the ranges of their entries, in units of s and s^2."""

    mean: str
    variance: str
    shift: float
    growth: float


def upload_statistics(graph: ProgramGraph, local: LocalTraining, upload: Upload) -> None:
    """Add the outputs `NAME.update` of every shared running mean and variance: d_k and s_k times the weight.

    The graph has the device's weight already, unless weighting is uniform. Raises ConversionError for another type than
    float32.
    """
    floor = graph.constant("variance_floor", FLOOR) if local.statistics else ""
    for pair in local.statistics:
        if pair.dtype != "float32":
            raise ConversionError(
                f"strategy {graph.name!r}: running statistics {pair.mean!r}, {pair.variance!r} are {pair.dtype}; only "
                "float32 can be averaged"
            )
        mean, _ = _change(graph, pair, pair.mean)
        variance, first = _change(graph, pair, pair.variance)
        square = graph.node("Add", [first, floor], f"{pair.variance}.unit")
        unit = graph.node("Sqrt", [square], f"{pair.mean}.unit")
        shift = graph.node("Div", [mean, unit], f"{pair.mean}.shift")
        spread = graph.node("Mul", [shift, shift], f"{pair.mean}.spread")
        within = graph.node("Div", [variance, square], f"{pair.variance}.within")
        growth = graph.node("Add", [within, spread], f"{pair.variance}.growth")
        _upload(graph, pair, upload, shift, "mean")
        _upload(graph, pair, upload, growth, "variance")


def _change(graph: ProgramGraph, pair: RunningPair, name: str) -> tuple[str, str]:
    """Add end - start of a statistic. Returns the names of that and of the start."""
    start = graph.input(Start(name=f"{name}.start", tensor=name, dtype="float32", shape=pair.shape))
    end = graph.input(Parameter(name=name, tensor=name, dtype="float32", shape=pair.shape))
    return graph.node("Sub", [end, start], f"{name}.change"), start


def _upload(
    graph: ProgramGraph, pair: RunningPair, upload: Upload, value: str, kind: Literal["mean", "variance"]
) -> None:
    tensor = pair.mean if kind == "mean" else pair.variance
    # Clamped before the weight, as the encoding does, so that a change of any size is a finite number.
    span = float(upload.statistics_range) ** (1 if kind == "mean" else 2)
    limits = [graph.constant(f"{kind}_{sign}", span if sign == "most" else -span) for sign in ("least", "most")]
    entry = graph.node("Clip", [value, *limits], f"{tensor}.clamped")
    if upload.weighting == "examples":
        entry = graph.node("Mul", [entry, graph.own("weight")], f"{tensor}.weighted")
    graph.output(
        Update(
            name=graph.node("Identity", [entry], f"{tensor}.update"), tensor=tensor, dtype="float32", shape=pair.shape,
            kind=kind, weighting=upload.weighting, range=span, bits=upload.other_bits,
            mean=pair.mean if kind == "variance" else "",
        )
    )  # fmt: skip


def shared_statistics(manifest: Manifest) -> tuple[Shared, ...]:
    """The pairs that devices of a training upload; none in a bundle whose statistics stay on the device."""
    entries = [
        port
        for program in manifest.programs.values()
        if program.kind == "finish"
        for port in program.outputs
        if isinstance(port, Update)
    ]
    shifts = {port.tensor: port.range for port in entries if port.kind == "mean"}
    return tuple(
        Shared(port.mean, port.tensor, shifts[port.mean], port.range) for port in entries if port.kind == "variance"
    )


def split_statistics(tensors: Mapping[str, np.ndarray], pairs: Iterable[Shared]) -> tuple[Tensors, Tensors]:
    """The tensors that gradients train, which strategies know, and the running statistics."""
    names = {name for pair in pairs for name in (pair.mean, pair.variance)}
    weights = {name: array for name, array in tensors.items() if name not in names}
    return weights, {name: array for name, array in tensors.items() if name in names}


def combine_statistics(
    statistics: Mapping[str, np.ndarray], total: DecodedSum, cohort: int, pairs: Sequence[Shared], scale: float = 1.0
) -> Tensors:
    """The running statistics after a round, in their dtypes.

    `total` is the checked sum of a cohort. A variance grows by no more than the factor 1 + its range and shrinks by no
    more, and a mean shifts by no more than its range. `scale`: the part of the way that the round's step goes, as
    strategies.step_limits decides it.
    """
    weight = total.total_weight(cohort)
    if weight <= 0:
        return dict(statistics)
    after: Tensors = {}
    for pair in pairs:
        variance = statistics[pair.variance].astype(np.float64)
        square = np.maximum(variance, 0.0) + FLOOR
        # Rounding of the encoding can lead a little beyond the ranges; what devices check has no such exception.
        shift = np.clip(total.moments[pair.mean] / weight, -pair.shift, pair.shift)
        between = np.where(np.abs(shift) < _NEAR * pair.shift, np.square(shift), 0.0)
        most = 1.0 + pair.growth
        factor = np.clip(1.0 + total.moments[pair.variance] / weight - between, 1.0 / most, most)
        moved = {
            pair.mean: scale * np.sqrt(square) * shift,
            pair.variance: np.maximum(variance + scale * square * (factor - 1.0), 0.0) - variance,
        }
        for name, change in moved.items():
            after[name] = (statistics[name].astype(np.float64) + change).astype(statistics[name].dtype)
    return after


def check_statistics(
    what: str,
    statistics: Mapping[str, np.ndarray],
    others: Mapping[str, np.ndarray],
    pairs: Sequence[Shared],
    back: int,
    on: int,
) -> None:
    """Check that rounds can lead from `others` to `statistics`: `back` rounds back from there, and then `on` rounds.

    Names, shapes and dtypes agree already. Raises ProvenanceError, also for numbers that are not finite and for
    variances below 0.
    """
    # Round i from `others` begins where as many rounds can have changed the unit; one that is taken back ends there.
    passed = np.concatenate([np.arange(1, min(back, _MANY) + 1), back + np.arange(min(on, _MANY))])
    for pair in pairs:
        mean, first_mean = (tensors[pair.mean].astype(np.float64) for tensors in (statistics, others))
        square, first = (tensors[pair.variance].astype(np.float64) + FLOOR for tensors in (statistics, others))
        # A round multiplies s^2 by a factor of at most 1 + growth, or divides by that. Logarithms do not overflow.
        most = math.log1p(pair.growth) + _SLACK
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            ratio = np.abs(np.log(square / first))
            reach = pair.shift * (1 + _SLACK) * np.exp(passed * most / 2).sum()
            allowed = reach * np.sqrt(first) + (back + on) * 2.0**-22 * np.maximum(np.abs(mean), np.abs(first_mean))
        # Negated, because no comparison with a NaN is true.
        if not (np.isfinite(square) & (square >= FLOOR) & (ratio <= (back + on) * most + 1e-6)).all():
            _refuse(what, pair.variance, back + on, pair.growth)
        if not (np.isfinite(mean) & (np.abs(mean - first_mean) <= allowed)).all():
            _refuse(what, pair.mean, back + on, pair.shift)


def _refuse(what: str, name: str, steps: int, span: float) -> None:
    raise ProvenanceError(
        f"{what}: running statistic {name!r} is not finite, or farther from weights that this device knows than "
        f"{steps} rounds of range {span:g} can move it; these are not the weights that the server says they are"
    )
