"""What a training round sums beside the update: the means of the devices' metrics, and counts of devices.

The bundle's signed manifest says which (bundle.roles.Metric, `range`); the device itself adds the entries:

| entry | of | one device's value |
|---|---|---|
| archipel/training/NAME | a metric of the train programs | its mean over the round's steps, times the device's weight |
| archipel/clamped/NAME | the same | the weight, if the mean was beyond the range and so was clamped to it; else 0 |
| archipel/devices/NAME | a metric of `finish` | 0 or 1, so that the sum counts devices exactly |

The weight is that of the device's update, so the sum of the weights is in the sum already. An entry has as many bits as
the widest of the update: with more, the modulus and with it the whole upload could grow. Beside packed deltas, where
each entry has bits of its own (protocol.narrow), it has at least 16.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from archipel.bundle import Manifest
from archipel.bundle.roles import Metric, Program, Update
from archipel.errors import ProtocolError
from archipel.protocol.bounds import Updates, weight_port

TRAINING = "archipel/training/"
"""Prefix of the entry with the mean of a metric."""
CLAMPED = "archipel/clamped/"
"""Prefix of the entry that says whether a metric was clamped."""
DEVICES = "archipel/devices/"
"""Prefix of the entry that counts devices."""
CLIPPED, CAPPED = "update/clipped", "update/capped"
"""Metrics of `finish` that are 1 of a device whose update was clipped, or with more examples than its weight counts.

The slash keeps them apart from the names of tensors."""
UPDATE_CLIP = "update_clip"
"""The hyperparameter of `finish` with the round's clip, where the server adapts it; the update entries state the most.
"""
OTHER_BITS = 16
"""The least bits of entries beside packed deltas, which are few."""


def count_entry(name: str) -> Update:
    """An entry that is 0 or 1 of each device."""
    # Two bits are -1, 0 and 1: the step is 1, so the sum is a whole number.
    return Update(
        name=name, tensor=name, dtype="float32", shape=(), kind="value", weighting="uniform", range=1.0, bits=2
    )


def metric_ranges(manifest: Manifest) -> dict[str, float]:
    """The metrics of the round's train programs that are summed, with their ranges, in the order of their names."""
    programs = [manifest.programs[phase.program] for phase in manifest.schedule]
    return dict(sorted(pair for program in programs for pair in _summed(program).items()))


def counted_metrics(finish: Program) -> list[str]:
    """The metrics of `finish` that are summed, each 0 or 1 of a device, in the order of their names."""
    return sorted(_summed(finish))


def training_entries(manifest: Manifest, finish: Program, updates: Updates) -> tuple[Update, ...]:
    """The entries of the metrics and counts, which follow the `updates` of `finish`.

    Raises ProtocolError where the program's own entries have such a name.
    """
    weight, bits = weight_port(updates), max(port.bits for port in updates)
    if any(port.carries is not None for port in updates):
        bits = max(bits, OTHER_BITS)
    ranges = metric_ranges(manifest)
    bounds = {TRAINING + name: bound for name, bound in ranges.items()} | {CLAMPED + name: 1.0 for name in ranges}
    means = [
        Update(
            name=name, tensor=name, dtype="float32", shape=(), kind="value",
            weighting="uniform" if weight is None else weight.weighting, range=bound, bits=bits,
        )
        for name, bound in bounds.items()
    ]  # fmt: skip
    entries = (*means, *(count_entry(DEVICES + name) for name in counted_metrics(finish)))
    # A program's entry of the same name could stand in for the device's.
    names = {port.name for port in entries}
    for port in updates:
        if taken := {port.name, port.tensor} & names:
            raise ProtocolError(f"bundle {manifest.name!r}: the name {min(taken)!r} is not for programs to use")
    return entries


def training_arrays(
    manifest: Manifest, finish: Program, update: Mapping[str, NDArray[Any]], metrics: Mapping[str, float]
) -> dict[str, NDArray[Any]]:
    """The arrays of `training_entries`, float32 scalars, of a device that computed this update.

    Arguments:
        manifest: the bundle's.
        finish: its program that made the update.
        update: the arrays of that program's update entries, by output name.
        metrics: the round's metrics by name: of training the means over its steps, of `finish` its numbers.

    Raises ProtocolError for a metric that is missing, not a finite number, or of `finish` neither 0 nor 1.
    """
    port = weight_port([each for each in finish.outputs if isinstance(each, Update)])
    weight = 1.0 if port is None else float(update[port.name])
    entries = {}
    for name, bound in metric_ranges(manifest).items():
        value = metrics.get(name, float("nan"))
        if not np.isfinite(value):
            raise ProtocolError(f"metric {name!r}: is {value} on this device; it cannot be summed")
        entries[TRAINING + name] = min(max(value, -bound), bound) * weight
        entries[CLAMPED + name] = weight if abs(value) > bound else 0.0
    for name in counted_metrics(finish):
        value = metrics.get(name, float("nan"))
        if value not in (0.0, 1.0):
            raise ProtocolError(f"metric {name!r}: is {value} on this device, expected 0 or 1")
        entries[DEVICES + name] = value
    return {name: np.array(value, np.float32) for name, value in entries.items()}


def lane_training_arrays(
    manifest: Manifest,
    finish: Program,
    update: Mapping[str, NDArray[Any]],
    metrics: Mapping[str, NDArray[np.float64]],
    devices: int,
) -> tuple[dict[str, NDArray[Any]], NDArray[np.bool_]]:
    """`training_arrays` of several devices at once.

    Arguments:
        manifest, finish: as of `training_arrays`.
        update: the devices' update entries, `[devices, ...]`.
        metrics: `[devices]` by name.
        devices: how many.

    Returns the arrays, float32 `[devices]`, and for which devices `training_arrays` would raise no error.
    """
    port = weight_port([each for each in finish.outputs if isinstance(each, Update)])
    weight = np.ones(devices) if port is None else np.asarray(update[port.name], np.float64).reshape(devices)
    missing = np.full(devices, np.nan)
    fine = np.ones(devices, bool)
    entries = {}
    for name, bound in metric_ranges(manifest).items():
        value = metrics.get(name, missing)
        fine &= np.isfinite(value)
        entries[TRAINING + name] = np.clip(value, -bound, bound) * weight
        entries[CLAMPED + name] = np.where(np.abs(value) > bound, weight, 0.0)
    for name in counted_metrics(finish):
        value = metrics.get(name, missing)
        fine &= (value == 0.0) | (value == 1.0)
        entries[DEVICES + name] = value
    return {name: value.astype(np.float32) for name, value in entries.items()}, fine


def _summed(program: Program) -> dict[str, float]:
    ports = [port for port in program.outputs if isinstance(port, Metric)]
    return {port.name: port.range for port in ports if port.range is not None}
