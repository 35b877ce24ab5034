"""What decides simulated time: how fast devices are, when they are there, how often they leave, and the task's mode."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import msgspec

from archipel.errors import SimulationError
from archipel.protocol.operator.tasks import DeadlinePhase, Mode

Leg = Literal[
    "fetching", "training", "uploading", "advertising", "sharing", "complaining", "confirming", "unmasking",
]  # fmt: skip
"""A part of a device's round. All rounds have the first three; secure ones have the others too, and `uploading` is then
their phase masking."""


class Spread(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a quantity differs from device to device: log-normal or heavy-tailed.

    Arguments:
        median, sigma: log-normal: the median, and the standard deviation of the natural logarithm.
        best, alpha: Pareto: nobody is better than `best`, and the share of devices that are worse by more than a factor
            f is f^-alpha. Worse are more seconds, or fewer bytes per second. The smaller alpha, the heavier the tail:
            at 1 or below slow devices have no mean.

    Raises SimulationError unless one of the pairs is there, with positive numbers.

    Example:
        Spread(median=2.5e5, sigma=1.0)
    """

    median: float | None = None
    sigma: float | None = None
    best: float | None = None
    alpha: float | None = None

    def __post_init__(self) -> None:
        given = [(self.median, self.sigma), (self.best, self.alpha)]
        pairs = [pair for pair in given if pair != (None, None)]
        if len(pairs) != 1 or None in pairs[0]:
            raise SimulationError("system: a spread has median and sigma (log-normal), or best and alpha (Pareto)")
        for value in pairs[0]:
            assert value is not None
            if not (math.isfinite(value) and value > 0):
                raise SimulationError(f"system: a spread has positive numbers, got {value!r}")

    def factor(self, uniform: float, normal: float) -> tuple[float, float]:
        """What is usual, and how much worse a device is, for its draws from (0, 1) and from a normal distribution."""
        if self.median is not None and self.sigma is not None:
            return self.median, math.exp(self.sigma * normal)
        assert self.best is not None
        assert self.alpha is not None
        return self.best, uniform ** (-1.0 / self.alpha)


class Device(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One device of a trace.

    Arguments:
        seconds_per_step: of training, one batch a step.
        down, up: bytes per second.
        windows: from when to when it is there, in seconds from the beginning of each period; none: always.

    Example:
        Device(seconds_per_step=0.1, down=1e6, up=2.5e5)
    """

    seconds_per_step: float
    down: float = math.inf
    up: float = math.inf
    windows: tuple[tuple[float, float], ...] = ()

    def __post_init__(self) -> None:
        if not (math.isfinite(self.seconds_per_step) and self.seconds_per_step >= 0):
            raise SimulationError(f"system: seconds_per_step: {self.seconds_per_step!r} is not 0 or more")
        for name in ("down", "up"):
            if not getattr(self, name) > 0:
                raise SimulationError(f"system: {name}: {getattr(self, name)!r} is not a positive number of bytes/s")
        last = -math.ulp(0.0)
        for start, end in self.windows:
            if not last < start < end < math.inf:
                raise SimulationError(
                    f"system: windows: {start:g} to {end:g} is no window; they follow each other, from 0 on"
                )
            last = end


class System(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The devices of a simulated federation, for a virtual clock. The run's seed draws what is not given.

    Arguments:
        seconds_per_step: of training; a number, or a Spread.
        down, up: bytes per second; a number, or a Spread.
        latency: seconds of each exchange with the server, beside what its bytes take.
        dropouts: the share of devices that vanish in each part of their round, by its name (see Leg), 0 to 1.
        available: the share of each period in which a device is there, once a period, at an hour of its own.
        period: seconds.
        devices: a trace in place of all that: devices, or the name of a file (see `read_devices`). Device i of the run
            is device i of the trace, which begins again at its end.
        model_steps: where devices have different models, how long a step of each takes, in steps of the first; none:
            as long, as in a trace of what each device was measured to take with its own model.

    Example:
        System(seconds_per_step=Spread(best=0.02, alpha=1.2), up=Spread(median=2.5e5, sigma=1.0))
    """

    seconds_per_step: float | Spread = 0.1
    down: float | Spread = 1e6
    up: float | Spread = 2.5e5
    latency: float = 0.0
    dropouts: dict[Leg, float] = {}
    available: float = 1.0
    period: float = 86400.0
    devices: str | tuple[Device, ...] = ()
    model_steps: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for name in ("seconds_per_step", "down", "up", "latency", "period"):
            value = getattr(self, name)
            least = 0.0 if name in ("latency", "seconds_per_step") else math.ulp(0.0)
            if isinstance(value, float | int) and not least <= value < math.inf:
                raise SimulationError(
                    f"system: {name}: {value!r} is not a number {'of 0 or more' if not least else 'above 0'}"
                )
        for factor in self.model_steps:
            if not 0 < factor < math.inf:
                raise SimulationError(f"system: model_steps: {factor!r} is not a number above 0")
        _check_shares(self.dropouts)
        if not 0 < self.available <= 1:
            raise SimulationError(f"system: available: {self.available!r} is not above 0 and at most 1")
        for device in () if isinstance(self.devices, str) else self.devices:
            if device.windows and device.windows[-1][1] > self.period:
                raise SimulationError(
                    f"system: a window ends at {device.windows[-1][1]:g} s, after the period of {self.period:g} s"
                )


def _check_shares(shares: Mapping[Leg, float]) -> None:
    known = Leg.__args__  # type: ignore[attr-defined]
    for name, share in shares.items():
        if name not in known:
            raise SimulationError(f"system: dropouts: {name!r} is none of {', '.join(known)}")
        if not 0 <= share <= 1:
            raise SimulationError(f"system: dropouts: {name}: {share!r} is not from 0 to 1")


class Pacing(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When rounds take their updates, with the names and meanings that a task has (`TaskRequest`).

    Arguments:
        mode: "synchronous", "semi-synchronous" or "asynchronous".
        goal: so many updates end a round early; None: it waits for the whole cohort.
        min_cohort: a semi-synchronous round succeeds with so many.
        threshold: of secret sharing in secure rounds; None: more than half of the cohort.
        concurrency: devices at work at once in an asynchronous task; None: twice the cohort.
        max_staleness, staleness_exponent: an update that began s versions ago counts (1 + s)^-exponent, and not at all
            above the maximum.
        deadlines: seconds by phase. A phase without one waits for all devices that have not vanished; one with a
            deadline does not learn who has vanished.

    Example:
        Pacing(mode="asynchronous", goal=10, concurrency=30)
    """

    mode: Mode = "semi-synchronous"
    goal: int | None = None
    min_cohort: int = 1
    threshold: int | None = None
    concurrency: int | None = None
    max_staleness: int = 20
    staleness_exponent: float = 0.5
    deadlines: dict[DeadlinePhase, float] = {}

    def __post_init__(self) -> None:
        modes = Mode.__args__  # type: ignore[attr-defined]
        if self.mode not in modes:
            raise SimulationError(f"mode: {self.mode!r} is none of {', '.join(modes)}")
        for name, least in (("goal", 1), ("min_cohort", 1), ("threshold", 1), ("concurrency", 1), ("max_staleness", 0)):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                raise SimulationError(f"{name}: {value!r} is not a whole number of {least} or more")
        if not 0 <= self.staleness_exponent <= 16:
            raise SimulationError(f"staleness_exponent: {self.staleness_exponent!r} is not from 0 to 16")
        for phase, seconds in self.deadlines.items():
            if phase not in DeadlinePhase.__args__:  # type: ignore[attr-defined]
                raise SimulationError(f"deadlines: {phase!r} is no phase of a round")
            if not 0 < seconds < math.inf:
                raise SimulationError(f"deadlines: {phase}: {seconds!r} is not a positive number of seconds")

    def check(self, cohort: int, secure: bool) -> None:
        """Raises SimulationError for numbers that do not fit a cohort of this size, as the server does."""
        needed = max(self.min_cohort, self.secret_threshold(cohort) if secure else 1)
        if cohort < needed:
            raise SimulationError(f"cohort: {cohort} is below min_cohort or threshold, {needed}")
        if self.mode == "asynchronous":
            if self.goal is not None:
                raise SimulationError("goal: an asynchronous task makes a version of every `cohort` updates")
            if self.concurrency is not None and self.concurrency < cohort:
                raise SimulationError(
                    f"concurrency: {self.concurrency} devices at work never fill a buffer of {cohort}, the cohort"
                )
        elif self.goal is not None and not needed <= self.goal <= cohort:
            raise SimulationError(f"goal: {self.goal} is not from {needed} to {cohort}, the cohort")

    def check_groups(self, cohort: int, groups: int) -> None:
        """The same for a cohort in so many secure groups, of which each has the task's minimum and threshold.

        Raises SimulationError.
        """
        if self.mode == "synchronous" or self.goal is not None:
            raise SimulationError(
                "secure_groups: a group that fails is left out, so its round waits for no number of updates; leave "
                "goal away, and take mode semi-synchronous"
            )
        needed = max(self.min_cohort, self.secret_threshold(-(-cohort // groups)))
        if cohort // groups < needed:
            raise SimulationError(
                f"secure_groups: {groups} groups of a cohort of {cohort} have {cohort // groups} devices, below "
                f"min_cohort or threshold, {needed}"
            )

    def secret_threshold(self, cohort: int) -> int:
        """The threshold of secret sharing in a cohort of so many devices."""
        return cohort // 2 + 1 if self.threshold is None else self.threshold
