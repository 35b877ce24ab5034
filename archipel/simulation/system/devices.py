"""Simulated devices by number: each one's speed, network and hours, drawn by hash from the run's seed."""

from __future__ import annotations

import math
from functools import lru_cache
from statistics import NormalDist

from archipel.simulation.draws import drawn_uniform
from archipel.simulation.system.settings import Device, Spread, System

_NORMAL = NormalDist()
_REMEMBERED = 1 << 16


class Fleet:
    """The devices of a run. A device is the same whenever it is asked for, so a population takes no memory.

    Arguments:
        system: with its trace read (`with_devices`).
        seed: the run's.
    """

    def __init__(self, system: System, seed: int) -> None:
        self._system, self._seed = system, seed
        self.device = lru_cache(_REMEMBERED)(self._draw)

    @property
    def always(self) -> bool:
        """Whether every device is there at any time."""
        trace = self._system.devices
        return not any(isinstance(device, Device) and device.windows for device in trace) and (
            bool(trace) or self._system.available == 1
        )

    def arrival(self, number: int, time: float) -> float:
        """When the device is there next: `time` itself while it is, in seconds."""
        windows, period = self.device(number).windows, self._system.period
        if not windows:
            return time
        base, within = divmod(time, period)
        for start, end in windows:
            if within < end:
                return base * period + max(start, within) if within < start else time
        return (base + 1) * period + windows[0][0]

    def departure(self, number: int, time: float) -> float:
        """When the device, which is there at `time`, leaves; infinity if it never does."""
        windows, period = self.device(number).windows, self._system.period
        if not windows or windows == ((0.0, period),):
            return math.inf
        base, within = divmod(time, period)
        # The first that is not over: rounding may put the device a little before the window that it came with.
        leaves = next((base * period + end for _, end in windows if within < end), (base + 1) * period + windows[0][1])
        # A window that goes on over the end of a period is two in the list.
        if leaves == (base + 1) * period and windows[0][0] == 0:
            return leaves + windows[0][1]
        return leaves

    def _draw(self, number: int) -> Device:
        system = self._system
        if system.devices:
            assert not isinstance(system.devices, str)
            return system.devices[number % len(system.devices)]
        return Device(
            seconds_per_step=self._worse("seconds_per_step", number),
            down=self._worse("down", number, -1),
            up=self._worse("up", number, -1),
            windows=self._windows(number),
        )

    def _worse(self, name: str, number: int, sign: int = 1) -> float:
        given: float | Spread = getattr(self._system, name)
        if not isinstance(given, Spread):
            return given
        # From (0, 1]: a Pareto factor of 0 would be infinite.
        uniform = 1.0 - drawn_uniform(f"device {name}", self._seed, 0, number)
        normal = _NORMAL.inv_cdf(min(max(uniform, 1e-16), 1 - 1e-16))
        usual, factor = given.factor(uniform, normal)
        return float(usual * factor**sign)

    def _windows(self, number: int) -> tuple[tuple[float, float], ...]:
        share, period = self._system.available, self._system.period
        if share == 1:
            return ()
        start = drawn_uniform("device hours", self._seed, 0, number) * period
        end = start + share * period
        return ((start, end),) if end <= period else ((0.0, end - period), (start, period))
