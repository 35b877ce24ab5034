"""Bounds of an update of a device that runs its signed program, and of the sum of a cohort's updates.

The manifest states a bound for every entry of an update (bundle.roles.Update). The devices' bounds add up to a bound of
the sum, because the triangle inequality holds for L2 norms as for absolute values. With w the device's weight (1 where
the entry is not weighted, or the program uploads no weight), k devices and W the sum of their weights as decoded:

| entries | one device | the sum |
|---|---|---|
| the weight | from `lowest` to `range` | from k lowest to k range |
| all deltas, all values with a clip | norm at most clip w | clip W', plus rounding, plus noise |
| each value without a clip | every element at most range w | range W', plus rounding, plus noise |

Rounding to fixed point moves an element by half a step at most, so the sum's norm by k sqrt(sum of (step / 2)^2), and
the sum of weights by k half steps: W' = W + k step / 2. Noise of standard deviation s in each of n elements has a norm
of at most s sqrt(k) (sqrt(n) + 12), and an element of at most 12 s sqrt(k), except in one sum of 10^30. Entries that
the program rounds by chance (`carries`) are whole steps; with the step h their rounding adds h sqrt(k) (sqrt(n) / 2 +
12) to the norm at most, as noise of deviation h / 2 does. SLACK allows for graphs, which clip in float32 and add up
squares in any order.

This module needs NumPy only and reads only the manifest, so that server and devices compute the same bounds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from archipel.bundle.roles import Rotation, Update
from archipel.errors import BoundError

SLACK = 1e-3
"""The relative error that float32 arithmetic in graphs may make."""
_TINY = 1e-12
"""The absolute error allowed: where a bound is 0, a relative one allows none."""
_TAIL = 12.0
"""In standard deviations: Gaussian noise exceeds this in less than one of 10^30 cases."""

Updates = Sequence[Update]
Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class Group:
    """Entries with one bound: those that the program clips together, or one entry without a clip.

    `norm` is the clip, or None: then the entry's range bounds each element. Where `weighted`, one device's bound is
    multiplied by its weight.
    """

    name: str
    ports: tuple[Update, ...]
    norm: float | None
    weighted: bool

    @property
    def bound(self) -> float:
        """The bound of one device of weight 1: of the L2 norm, or of the absolute value of an element."""
        return self.ports[0].range if self.norm is None else self.norm

    @property
    def norm_bound(self) -> float:
        """`bound` as one of the L2 norm in both cases."""
        # n elements of at most r have a norm of at most r sqrt(n).
        return self.bound if self.norm is not None else self.bound * math.sqrt(entries(self.ports[0]))

    def measure(self, arrays: Arrays) -> float:
        """What `bound` limits: the L2 norm, or the largest absolute value. `arrays` by port name."""
        parts = [arrays[port.name] for port in self.ports]
        if self.norm is None:
            return max((float(np.abs(part).max()) for part in parts if part.size), default=0.0)
        # In float64, because squares of float32 overflow from about 2e19 on.
        return joint_norm(parts)

    def noise(self, cohort: int) -> float:
        """What the noise of `cohort` devices adds to the measure at most."""
        deviations = [port.noise for port in self.ports]
        if not any(deviations):
            return self._chance(cohort)
        # The norm of n standard normals is about sqrt(n) and, as a function with Lipschitz constant 1, exceeds it by t
        # with probability exp(-t^2 / 2) at most (Gaussian concentration).
        spread = math.sqrt(sum(entries(port) for port in self.ports)) if self.norm is not None else 0.0
        return max(deviations) * math.sqrt(cohort) * (spread + _TAIL)

    def rounding(self, cohort: int) -> float:
        """What fixed point adds to the measure of the sum at most."""
        if self.norm is None:
            return cohort * step(self.ports[0]) / 2
        # Entries that the program itself rounded are whole steps already.
        rounded = [port for port in self.ports if not isinstance(port.carries, Rotation)]
        return cohort * math.sqrt(sum(entries(port) * (step(port) / 2) ** 2 for port in rounded))

    def _chance(self, cohort: int) -> float:
        """What stochastic rounding of `cohort` devices adds to the norm of the sum at most."""
        steps = [step(port) for port in self.ports if isinstance(port.carries, Rotation)]
        if not steps:
            return 0.0
        # Each error has one of two values a step apart and the mean 0, so a deviation of half a step at most; the norm
        # is a convex function of them with Lipschitz constant 1, and exceeds its mean by t steps with probability
        # exp(-t^2 / 2) at most (Samson 2000, "Concentration of measure inequalities", for independent variables).
        size = sum(entries(port) for port in self.ports if isinstance(port.carries, Rotation))
        return max(steps) * math.sqrt(cohort) * (math.sqrt(size) / 2 + _TAIL)


def joint_norm(arrays: Iterable[NDArray[Any]]) -> float:
    """The L2 norm of the elements of all arrays together, added up in float64, the same bits in whatever order."""
    return math.sqrt(math.fsum(float(np.square(array, dtype=np.float64).sum()) for array in arrays))


def entries(port: Update) -> int:
    """Number of elements of an update port."""
    return math.prod(int(dim) for dim in port.shape)


def largest(port: Update) -> int:
    """M, the integer that encodes `range`."""
    return (1 << (port.bits - 1)) - 1


def step(port: Update) -> float:
    """The value of one step of the fixed-point encoding."""
    return port.range / largest(port)


def weight_port(updates: Updates) -> Update | None:
    """The port that uploads the device's weight; None where the program uploads none."""
    return next((port for port in updates if port.kind == "weight"), None)


def groups(updates: Updates) -> list[Group]:
    """All entries but the weight, grouped by their bound."""
    has_weight = weight_port(updates) is not None
    ports_by_bound: dict[tuple[str, float | None, bool], list[Update]] = {}
    for port in updates:
        if port.kind == "weight":
            continue
        weighted = has_weight and port.weighting != "uniform"
        # A clip bounds the norm over all deltas (or all values) together; without one each tensor is its own group.
        name = f"{port.kind}s" if port.clip is not None else repr(port.tensor)
        ports_by_bound.setdefault((name, port.clip, weighted), []).append(port)
    return [Group(name, tuple(ports), clip, weighted) for (name, clip, weighted), ports in ports_by_bound.items()]


def weight_sums(updates: Updates, cohort: int) -> tuple[float, float]:
    """The smallest and the largest possible decoded sum of the weights of `cohort` devices.

    The runtime refuses to train without examples, so each device weighs at least as much as one with a single example.
    Both sums are whole numbers of steps, computed in integers.
    """
    port = weight_port(updates)
    if port is None:
        return float(cohort), float(cohort)
    # A weight of exactly `lowest` may be rounded down, and float32 may be off by its last bit.
    units = math.floor(port.lowest / step(port) * (1 - 1e-6))
    # Where `lowest` is below a step, a weight may be encoded as 0.
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
    """The most that `group` measures in a sum divided by the sum of weights (by `cohort` without uploaded weights).

    Infinite where the manifest states no smallest weight.
    """
    # sum_bound is c W + d with c and d not negative, so divided by W it is largest for the smallest W.
    least, _ = weight_sums(updates, cohort)
    if least <= 0:
        return math.inf
    return sum_bound(updates, group, cohort, least) / least


def check_sum(updates: Updates, sums: Arrays, cohort: int) -> None:
    """Raises BoundError unless `cohort` devices that run their signed program can have sent this sum.

    `sums`: float64 by port name, with the weight.
    """
    port = weight_port(updates)
    weights = float(cohort)
    if port is not None:
        # First the weight: the other bounds scale with it, so too large a weight would loosen them all.
        weights = float(sums[port.name])
        least, most = weight_sums(updates, cohort)
        if not least * (1 - SLACK) - _TINY <= weights <= most * (1 + SLACK):
            _reject(cohort, f"the sum of weights is {weights:.6g}, which is not from {least:.6g} to {most:.6g}")
    for group in groups(updates):
        size, bound = group.measure(sums), sum_bound(updates, group, cohort, weights)
        if not size <= bound + _TINY:  # negated, so that a NaN is refused
            what = "an entry of" if group.norm is None else "the norm of the"
            limit = f"{'range' if group.norm is None else 'clip'} {group.bound:g}"
            over = f"weights {weights:.6g}" if group.weighted else f"{cohort} devices"
            _reject(
                cohort,
                f"{what} {group.name} is {size:.6g}, and can be {bound:.6g} at most ({limit} times {over}, rounding "
                f"{group.rounding(cohort):.2g}, noise {group.noise(cohort):.2g})",
            )


def check_update(updates: Updates, arrays: Arrays) -> None:
    """Raises BoundError unless one device's `arrays` (by port name, finite) are within the manifest's bounds.

    Entries without a clip are not checked: the encoding clamps them, see `clamp`.
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
        norm = group.measure(arrays)
        if not norm <= bound * (1 + SLACK) + group.noise(1) + _TINY:
            times = f"clip {group.norm:g} times weight {weight:g}" if group.weighted else f"clip {group.norm:g}"
            raise BoundError(
                f"update: the norm of its {group.name} is {norm:g}, at most {bound:g} ({times}) is allowed; the "
                "program that made it breaks the bound that its manifest states"
            )


def clamp(updates: Updates, arrays: Arrays) -> dict[str, float]:
    """The absolute value to clamp each port's elements to, by port name: a weighted value's range times the weight."""
    weight_of = weight_port(updates)
    weight = 1.0 if weight_of is None else float(arrays[weight_of.name])
    limits = {port.name: port.range for port in updates}
    for group in groups(updates):
        if group.weighted and group.norm is None:
            port = group.ports[0]
            limits[port.name] = min(port.range, port.range * weight + port.noise * _TAIL)
    return limits


def _reject(cohort: int, what: str) -> None:
    raise BoundError(
        f"rejected: {what}, of {cohort} devices that run the signed program; at least one of them sent something else"
    )
