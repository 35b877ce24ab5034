"""What devices that keep to their signed program can send, and so what the sum of a cohort's updates can be.

Every entry of an update has a bound that the manifest states (bundle.roles.Update), and a bound of one device is one
of the sum: the triangle inequality holds for L2 norms as for absolute values. With w the device's weight (1 where the
entry is not weighted, or the program uploads no weight), k devices and W the sum of their weights as decoded:

| entries | one device | the sum |
|---|---|---|
| the weight | from `lowest` to `range` | from k lowest to k range |
| all deltas, all values with a clip | norm at most clip w | clip W', plus rounding, plus noise |
| each value without a clip | every element at most range w | range W', plus rounding, plus noise |

Rounding to fixed point moves an element by half a step at most, so the sum's norm by k sqrt(sum of (step / 2)^2), and
the sum of weights by k half steps: W' = W + k step / 2. Noise of standard deviation s in each of n elements has a norm
of at most s sqrt(k) (sqrt(n) + 12), and an element of at most 12 s sqrt(k), but for one sum in 10^30. Graphs clip in
float32 and sum squares in any order: SLACK.

NumPy only, and nothing about the model but its manifest: server and devices compute the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from archipel.bundle.roles import Update
from archipel.errors import BoundError

SLACK = 1e-3
"""Relative: what float32 arithmetic in graphs may be off by."""
_TINY = 1e-12
_TAIL = 12.0
"""In standard deviations: so far Gaussian noise goes in less than one of 10^30 cases."""

Updates = Sequence[Update]
Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class Group:
    """Entries with one bound: those that are clipped together (`norm` is their clip), or one entry that is not (`norm`
    is None and its range the bound of each element). `weighted`: one device's bound is to be multiplied by its weight.
    """

    name: str
    ports: tuple[Update, ...]
    norm: float | None
    weighted: bool

    @property
    def bound(self) -> float:
        """Of one device that weighs 1: the L2 norm, or the absolute value of an element."""
        return self.ports[0].range if self.norm is None else self.norm

    @property
    def norm_bound(self) -> float:
        """As an L2 norm in both cases."""
        return self.bound if self.norm is not None else self.bound * math.sqrt(entries(self.ports[0]))

    def measure(self, arrays: Arrays) -> float:
        """The L2 norm, or the largest absolute value. `arrays` by port name."""
        parts = [arrays[port.name] for port in self.ports]
        if self.norm is None:
            return max((float(np.abs(part).max()) for part in parts if part.size), default=0.0)
        return math.sqrt(sum(float(np.square(part, dtype=np.float64).sum()) for part in parts))

    def noise(self, cohort: int) -> float:
        """What the noise of `cohort` devices adds to the measure at most."""
        deviations = [port.noise for port in self.ports]
        if not any(deviations):
            return 0.0
        spread = math.sqrt(sum(entries(port) for port in self.ports)) if self.norm is not None else 0.0
        return max(deviations) * math.sqrt(cohort) * (spread + _TAIL)

    def rounding(self, cohort: int) -> float:
        """What fixed point adds to the measure of the sum at most."""
        if self.norm is None:
            return cohort * step(self.ports[0]) / 2
        return cohort * math.sqrt(sum(entries(port) * (step(port) / 2) ** 2 for port in self.ports))


def entries(port: Update) -> int:
    """Number of elements."""
    return math.prod(int(dim) for dim in port.shape)


def largest(port: Update) -> int:
    """M, the whole number that `range` becomes."""
    return (1 << (port.bits - 1)) - 1


def step(port: Update) -> float:
    """What one step of the fixed-point encoding is worth."""
    return port.range / largest(port)


def weight_port(updates: Updates) -> Update | None:
    return next((port for port in updates if port.kind == "weight"), None)


def groups(updates: Updates) -> list[Group]:
    """All entries but the weight, by what bounds them."""
    has_weight = weight_port(updates) is not None
    found: dict[tuple[str, float | None, bool], list[Update]] = {}
    for port in updates:
        if port.kind == "weight":
            continue
        weighted = has_weight and port.weighting != "uniform"
        name = f"{port.kind}s" if port.clip is not None else repr(port.tensor)
        found.setdefault((name, port.clip, weighted), []).append(port)
    return [Group(name, tuple(ports), clip, weighted) for (name, clip, weighted), ports in found.items()]


def weight_sums(updates: Updates, cohort: int) -> tuple[float, float]:
    """The least and the most that the decoded sum of weights of `cohort` devices can be.

    A device without examples takes no part in a training (the runtime refuses to train on none), so each weighs at
    least what one with a single example does. Both are whole numbers of steps, computed in integers.
    """
    port = weight_port(updates)
    if port is None:
        return float(cohort), float(cohort)
    # A weight of exactly `lowest` may be rounded down, and float32 may be off by its last bit.
    units = math.floor(port.lowest / step(port) * (1 - 1e-6))
    least = max(units, 1) if port.lowest >= step(port) else 0
    return cohort * least * step(port), cohort * largest(port) * step(port)


def sum_bound(updates: Updates, group: Group, cohort: int, weight_sum: float) -> float:
    """The most that `group` measures in a sum of `cohort` devices whose weights sum to `weight_sum`."""
    port = weight_port(updates)
    weights = float(cohort)
    if group.weighted and port is not None:
        weights = weight_sum + cohort * step(port) / 2
    return group.bound * weights * (1 + SLACK) + group.rounding(cohort) + group.noise(cohort)


def mean_bound(updates: Updates, group: Group, cohort: int) -> float:
    """The most that `group` measures in a sum divided by the sum of weights (by `cohort`, where none are uploaded).

    sum_bound is c W + d with c and d not negative, so divided by W it is largest for the least W. Infinite where the
    manifest states no least weight.
    """
    least, _ = weight_sums(updates, cohort)
    if least <= 0:
        return math.inf
    return sum_bound(updates, group, cohort, least) / least


def check_sum(updates: Updates, sums: Arrays, cohort: int) -> None:
    """Raises BoundError unless `cohort` devices that keep to their program can have sent this sum.

    `sums`: float64 by port name, the weight among them.
    """
    port = weight_port(updates)
    weights = float(cohort)
    if port is not None:
        weights = float(sums[port.name])
        least, most = weight_sums(updates, cohort)
        if not least * (1 - SLACK) - _TINY <= weights <= most * (1 + SLACK):
            _reject(cohort, f"the sum of weights is {weights:.6g}, which is not from {least:.6g} to {most:.6g}")
    for group in groups(updates):
        found, bound = group.measure(sums), sum_bound(updates, group, cohort, weights)
        if not found <= bound + _TINY:  # nor a NaN
            what = "an entry of" if group.norm is None else "the norm of the"
            limit = f"{'range' if group.norm is None else 'clip'} {group.bound:g}"
            over = f"weights {weights:.6g}" if group.weighted else f"{cohort} devices"
            _reject(
                cohort,
                f"{what} {group.name} is {found:.6g}, and can be {bound:.6g} at most ({limit} times {over}, rounding "
                f"{group.rounding(cohort):.2g}, noise {group.noise(cohort):.2g})",
            )


def check_update(updates: Updates, arrays: Arrays) -> None:
    """Raises BoundError unless one device's `arrays` (by port name, finite) keep to what the manifest states of them.

    Elements without a clip are left alone: the encoding clamps them, see `clamp`.
    """
    port = weight_port(updates)
    weight = 1.0
    if port is not None:
        weight = float(arrays[port.name])
        if not port.lowest * (1 - SLACK) <= weight <= port.range * (1 + SLACK):
            raise BoundError(
                f"update {port.name!r}: the weight is {weight:g}, expected at least {port.lowest:g} and up to "
                f"{port.range:g}, as the manifest states"
            )
    for group in groups(updates):
        if group.norm is None:
            continue
        bound = group.norm * (weight if group.weighted else 1.0)
        found = group.measure(arrays)
        if not found <= bound * (1 + SLACK) + group.noise(1) + _TINY:
            times = f"clip {group.norm:g} times weight {weight:g}" if group.weighted else f"clip {group.norm:g}"
            raise BoundError(
                f"update: the norm of its {group.name} is {found:g}, at most {bound:g} ({times}) is allowed; the "
                "program that made it does not keep to its manifest"
            )


def clamp(updates: Updates, arrays: Arrays) -> dict[str, float]:
    """By port name: what each element is to be clamped to. A value that was weighted has its range times the weight."""
    port = weight_port(updates)
    weight = 1.0 if port is None else float(arrays[port.name])
    limits = {each.name: each.range for each in updates}
    for group in groups(updates):
        if group.weighted and group.norm is None:
            each = group.ports[0]
            limits[each.name] = min(each.range, each.range * weight + each.noise * _TAIL)
    return limits


def _reject(cohort: int, what: str) -> None:
    raise BoundError(
        f"rejected: {what}, of {cohort} devices that keep to their program; at least one of them sent something else"
    )
