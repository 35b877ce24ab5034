"""What a device uploads for each kind of task, as one Layout that server and device derive for themselves.

| kind | entries |
|---|---|
| training | the update outputs of the bundle's `finish` program, then metrics (protocol.training_metrics) |
| analytics | the update outputs of an `analyze` program |
| evaluation | w = min(count, max_examples) / max_examples; each mean times w; w again for each mean that was clamped |
| evaluation with distributions | for each metric 1 in the bin of the device's own value, 0 in the others |
| evaluation, analytics | whether the device has examples |
| evaluation that counts adoption | whether the device decided about the version; its noisy answer whether it took it |

The device clamps a mean that is beyond its range, as the fixed-point encoding clamps every entry. It says so in another
entry, so that nobody takes the bound for a measurement. archipel.protocol.metrics.measures says what the means are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec
import numpy as np

from archipel.bundle import Manifest, Program
from archipel.bundle.roles import Hyperparameter, Rotation, Update
from archipel.errors import ProtocolError
from archipel.protocol.messages import Kind, RoundPlan
from archipel.protocol.messages.distributions import Bins
from archipel.protocol.metrics.distributions import one_hot
from archipel.protocol.metrics.measures import askable
from archipel.protocol.metrics.training_metrics import CLAMPED, DEVICES, UPDATE_CLIP, count_entry, training_entries
from archipel.protocol.noised.layout import NoisedLayout
from archipel.protocol.sites import site_layout
from archipel.protocol.vector import Layout

EXAMPLES = "archipel/examples"
"""The entry of an evaluation with the weight."""
CONTRIBUTORS = "archipel/contributors"
"""The entry of an analysis or evaluation that is 1 of a device with examples, 0 of one without: their sum is exact."""

BINS = "archipel/bins/"
"""Prefix of the entry with the counts of a metric's bins."""
DECIDED, TOOK = "archipel/decided", "archipel/took"
"""The entries of an evaluation that counts adoption. Both are 0 of a device that has not decided, or does not count."""
TRUTHFUL = 0.75
"""The probability with which a device's answer is the true one; epsilon is ln(TRUTHFUL / (1 - TRUTHFUL)) = ln 3."""

_SEEDS = 1 << 32
_KINDS = {"training": "finish", "evaluation": "evaluate", "analytics": "analyze"}


def upload_program(manifest: Manifest, kind: Kind, name: str = "") -> Program:
    """The program whose outputs devices upload.

    Raises ProtocolError where there is none of that `name`, or where without a name the kind has not exactly one.
    """
    required = _KINDS[kind]
    programs = {key: program for key, program in manifest.programs.items() if program.kind == required}
    if name:
        if name not in programs:
            raise ProtocolError(
                f"bundle {manifest.name!r} has no program {name!r} of kind {required!r}; it has: {sorted(programs)}"
            )
        return programs[name]
    if len(programs) != 1:
        hint = "; name one" if programs else ""
        raise ProtocolError(
            f"bundle {manifest.name!r} has {len(programs)} {required} programs; a task of kind {kind} needs one{hint}"
        )
    return next(iter(programs.values()))


def upload_layout(
    manifest: Manifest,
    kind: Kind,
    name: str = "",
    metrics: Mapping[str, float] | None = None,
    *,
    count_adoption: bool = False,
    distributions: Mapping[str, Bins] | None = None,
) -> Layout:
    """Where each entry lies. Of an evaluation, by name, `metrics` has ranges and `distributions` bins.

    Raises ProtocolError.
    """
    program = upload_program(manifest, kind, name)
    if kind == "training":
        updates = Layout.of(program).updates
        own = training_entries(manifest, program, updates)
        return Layout((*updates, *own), _counts(own))
    made = Layout.of(program) if kind == "analytics" else _evaluation_layout(manifest, program, metrics or {})
    counts = (CONTRIBUTORS, *((DECIDED, TOOK) if count_adoption else ()))
    # A program's entry of the same name could stand in for the device's count.
    for port in made.updates:
        if taken := {port.name, port.tensor} & set(counts):
            raise ProtocolError(f"bundle {manifest.name!r}: the name {min(taken)!r} is not for programs to use")
    histograms = _histograms(metrics or {}, distributions or {})
    return Layout(
        (*made.updates, *histograms, *map(count_entry, counts)),
        made.not_negative | set(counts),
        frozenset((port.name, CONTRIBUTORS) for port in histograms),
    )


def plan_layout(plan: RoundPlan, manifest: Manifest) -> Layout:
    """The layout of the updates of the plan's round, whose deltas keep to the clip of the plan, where it sets one.

    Raises ProtocolError, and PolicyError where devices add noise that cannot cover what they send.
    """
    layout = _clipped_layout(plan, manifest)
    if plan.levels:
        return site_layout(layout)  # the policy's check refuses noise of devices
    if plan.noise is None or plan.kind != "training":
        return layout  # the policy's check refuses noise in other rounds
    return NoisedLayout.over(layout, plan.noise, plan.number % _SEEDS)


def _clipped_layout(plan: RoundPlan, manifest: Manifest) -> Layout:
    layout = upload_layout(
        manifest, plan.kind, plan.program, plan.metrics,
        count_adoption=plan.count_adoption, distributions=plan.distributions,
    )  # fmt: skip
    port = clip_input(upload_program(manifest, plan.kind, plan.program)) if plan.kind == "training" else None
    if port is None:
        return layout
    clip = plan.hyperparameters.get(UPDATE_CLIP, port.default)
    return Layout(tuple(_keep_to_clip(each, clip) for each in layout.updates), layout.not_negative, layout.histograms)


def _keep_to_clip(port: Update, clip: float) -> Update:
    if port.kind != "delta" or port.clip is None or clip >= port.clip:
        return port
    # A rotation's elements are as much smaller as the whole update is, so their steps can be.
    span = port.range * (clip / port.clip) if isinstance(port.carries, Rotation) else port.range
    return msgspec.structs.replace(port, clip=clip, range=span)


def clip_input(finish: Program) -> Hyperparameter | None:
    """The input of `finish` with the clip that a plan may set; None where the bundle fixes it."""
    ports = [port for port in finish.inputs if isinstance(port, Hyperparameter) and port.name == UPDATE_CLIP]
    return ports[0] if ports else None


def contribution(examples: int) -> dict[str, np.ndarray]:
    """The array of the entry CONTRIBUTORS of a device with so many examples."""
    return {CONTRIBUTORS: np.array(float(examples > 0), np.float32)}


def adoption(answer: bool | None) -> dict[str, np.ndarray]:
    """The arrays of the entries DECIDED and TOOK; `answer` None: of a device that has not decided."""
    return {
        DECIDED: np.array(float(answer is not None), np.float32),
        TOOK: np.array(float(answer is True), np.float32),
    }


def metric_arrays(
    metrics: Mapping[str, float],
    ranges: Mapping[str, float],
    examples: int,
    max_examples: int,
    distributions: Mapping[str, Bins] | None = None,
) -> dict[str, np.ndarray]:
    """The arrays of an evaluation's layout, float32: scalars, and counts in bins. `metrics`: means over `examples`
    examples.

    Raises ProtocolError for a metric that is missing or not a finite number.
    """
    # Means are uploaded times the weight, so that the server can divide their sum by the sum of the weights.
    weight = min(examples, max_examples) / max_examples
    entries = {EXAMPLES: weight}
    for name, bound in ranges.items():
        # Without examples there is no mean, and with a weight of 0 any value counts for nothing.
        value = metrics.get(name, float("nan")) if examples else 0.0
        if not np.isfinite(value):
            raise ProtocolError(f"metric {name!r}: is {value} on this device; it cannot be summed")
        entries[name] = min(max(value, -bound), bound) * weight
        # Weighted like the means, so that its mean is the share of the examples on devices that clamped.
        entries[CLAMPED + name] = weight if abs(value) > bound else 0.0
    counted = {
        BINS + name: one_hot(bins, metrics[name] if examples else None) for name, bins in (distributions or {}).items()
    }
    scalars = {name: np.array(value, np.float32) for name, value in entries.items()}
    return {**scalars, **counted, **contribution(examples)}


def _evaluation_layout(manifest: Manifest, program: Program, metrics: Mapping[str, float]) -> Layout:
    known = askable(program)
    if not metrics:
        raise ProtocolError(f"metrics: an evaluation needs at least one, with its range; there are {known}")
    for name in metrics:
        if name not in known:
            raise ProtocolError(f"metric {name!r}: bundle {manifest.name!r} computes {known}")
    bits = manifest.privacy.max_bits
    # Sorted, so that server and device derive one order from a mapping.
    names = sorted(metrics)
    ranges = {**{name: metrics[name] for name in names}, **{CLAMPED + name: 1.0 for name in names}, EXAMPLES: 1.0}
    updates = tuple(
        Update(
            name=name, tensor=name, dtype="float32", shape=(), weighting="examples", range=bound, bits=bits,
            kind="weight" if name == EXAMPLES else "value",
        )
        for name, bound in ranges.items()
    )  # fmt: skip
    return Layout(updates, _counts(updates))


def _histograms(metrics: Mapping[str, float], distributions: Mapping[str, Bins]) -> tuple[Update, ...]:
    for name in distributions:
        if name not in metrics:
            raise ProtocolError(
                f"distributions: {name!r} is not among the metrics, {sorted(metrics)}; name it there too"
            )
    return tuple(
        msgspec.structs.replace(count_entry(BINS + name), shape=(distributions[name].count + 2,))
        for name in sorted(distributions)
    )


def _counts(own: Iterable[Update]) -> frozenset[str]:
    """Those of a device's own entries that count devices, or their weights: none is below 0."""
    return frozenset(port.name for port in own if port.name.startswith((CLAMPED, DEVICES)))
