"""Noise on the sums of evaluations and analyses, added by the server before it makes a result of them.

The unit is a device. Its runtime encodes every entry of its vector as a whole number of at most M steps (protocol.
vector), and counts itself in one bin of each histogram of devices; entries with a clip have a norm of at most that
together. So the vector falls into k blocks, of each of which a device changes the sum by a known D at most: M sqrt(n)
for n elements, 1 for a histogram of devices. A block gets discrete Gaussian noise of standard deviation z sqrt(k) D, so
all of them together cost as much as one Gaussian with noise multiplier z: the sum of D^2 / (z^2 k D^2) over k blocks is
1 / z^2 (Canonne, Kamath and Steinke 2020, for single elements of different scales). Everything that is computed from
the noisy sums, means and quantiles too, costs nothing more.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from archipel.bundle.roles import Update
from archipel.errors import PolicyError
from archipel.privacy.central import Randomness, sensitivity
from archipel.protocol.bounds import entries, groups, largest, step, weight_port
from archipel.protocol.mistakes import tell
from archipel.protocol.operator.differential_privacy import DifferentialPrivacy
from archipel.protocol.vector import DecodedSum, Layout


@dataclass(frozen=True)
class Block:
    """Entries of which one device changes the sum by at most `most` steps, in the L2 norm."""

    ports: tuple[Update, ...]
    most: float


def check_query(settings: DifferentialPrivacy, layout: Layout, *, privacy: str, count_adoption: bool) -> None:
    """Whether an evaluation or analysis can have this noise. Raises PolicyError that names settings and remedies."""
    mistakes = list(_mistakes(settings, layout, privacy, count_adoption))
    if mistakes:
        raise PolicyError(tell([f"mechanism {settings.mechanism!r}: {each}" for each in mistakes]))


def _mistakes(settings: DifferentialPrivacy, layout: Layout, privacy: str, count_adoption: bool) -> Iterator[str]:
    if settings.mechanism != "central":
        yield "is for trainings, whose rounds add up; evaluations and analyses have 'central'"
    if settings.clip_noise is not None:
        yield "clip_noise is for trainings; leave it away"
    if privacy != "secure":
        yield "noise is added to whole numbers, which secure rounds sum; set privacy to 'secure'"
    if count_adoption:
        yield (
            "count_adoption has noise of the devices' own, and its standard error is of that alone; leave it away, or "
            "ask for it without differential_privacy"
        )
    for port in layout.updates:
        if port.noise:
            yield f"devices add noise to {port.tensor!r} already; leave mechanism away"
        if port.kind not in ("value", "weight"):
            yield (
                f"{port.tensor!r} is a {port.kind}, and noise is for counts, sums and means; have the program send "
                "values"
            )


def blocks(layout: Layout) -> list[Block]:
    """The blocks of the vector of an evaluation or analysis, in a fixed order."""
    bins = {name for name, _ in layout.histograms}
    weight = weight_port(layout.updates)
    found = [] if weight is None else [Block((weight,), float(largest(weight)))]
    for group in groups(layout.updates):
        size = sum(entries(port) for port in group.ports)
        if len(group.ports) == 1 and group.ports[0].name in bins:
            found.append(Block(group.ports, 1.0 / step(group.ports[0])))
            continue
        most = max(largest(port) for port in group.ports) * math.sqrt(size)
        if group.norm is not None and not (group.weighted and weight is not None):
            most = min(most, float(sensitivity(group)))
        found.append(Block(group.ports, most))
    return found


def deviations(layout: Layout, multiplier: float) -> dict[str, int]:
    """The standard deviation of the noise in each element of a port, in steps, by the port's name."""
    parts = blocks(layout)
    share = multiplier * math.sqrt(len(parts))
    return {port.name: max(math.ceil(share * part.most), 1) for part in parts for port in part.ports}


def add_noise(
    total: DecodedSum,
    layout: Layout,
    *,
    cohort: int,
    multiplier: float,
    randomness: Randomness = secrets.token_bytes,
) -> DecodedSum:
    """The sum with noise; counts of devices are from 0 to `cohort`, and so is a weight of at most 1 each.

    Arguments:
        total: exact and checked.
        layout: one that `check_query` accepts.
        cohort: how many devices' vectors are in it.
        multiplier: z.
        randomness: gives as many bytes from a cryptographic generator as it is asked for.
    """
    # Imported where noise is drawn: with it comes the device's runtime.
    from archipel.lite_runtime.many_samples import sample_gaussian

    sizes = deviations(layout, multiplier)
    positive = layout.not_negative | {name for name, _ in layout.histograms}
    noisy: dict[Update, NDArray[np.float64]] = {}
    for port in layout.updates:
        # A decoded sum is a whole number of steps below 2^31, so this gives it back exactly.
        whole = np.rint(np.asarray(total.read(port)).reshape(-1) / step(port)).astype(np.int64)
        whole = whole + np.asarray(sample_gaussian(sizes[port.name], len(whole), randomness), np.int64)
        if port.kind == "weight" or port.name in positive:
            whole = np.clip(whole, 0, cohort * largest(port))
        noisy[port] = np.asarray(whole * step(port), np.float64).reshape([int(dim) for dim in port.shape])
    return DecodedSum.of(noisy)


def errors_of(layout: Layout, multiplier: float) -> Mapping[str, float]:
    """The standard deviation of the noise in each element of a sum, in its units, by the name of its tensor."""
    sizes = deviations(layout, multiplier)
    return {port.tensor: sizes[port.name] * step(port) for port in layout.updates}
