"""One device's way through a phase: what it does, until when, how many bytes it moves, and whether it vanishes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from archipel.simulation.draws import drawn_uniform
from archipel.simulation.system.devices import Fleet
from archipel.simulation.system.settings import Leg, System
from archipel.simulation.system.traffic import Traffic

_NOTHING = Traffic()


@dataclass(frozen=True)
class Stretch:
    """A part of a phase: the bytes that it moves, and the training steps that it takes."""

    leg: Leg
    traffic: Traffic = _NOTHING
    steps: float = 0


@dataclass(frozen=True)
class Trip:
    """What a device did from `start` on. `legs` are its stretches with their ends; `left` says why it vanished at
    `end`, "" where it arrived."""

    client: int
    start: float
    end: float
    legs: tuple[tuple[Stretch, float], ...]
    left: str = ""

    @property
    def arrived(self) -> bool:
        return not self.left

    def moved(self, until: float) -> tuple[float, float]:
        """The bytes fetched and uploaded until then; of a stretch that is not over a part."""
        down = up = 0.0
        start = self.start
        for stretch, end in self.legs:
            over = min(until, self.end)
            # A stretch without a duration begins and ends at once.
            share = 1.0 if over >= end else 0.0 if over <= start else (over - start) / (end - start)
            down, up = down + share * stretch.traffic.down, up + share * stretch.traffic.up
            start = end
        return down, up


class Traveller:
    """Draws trips. Each draw is a hash of seed, round and device, so a run that goes on draws the same."""

    def __init__(self, fleet: Fleet, system: System, seed: int, dropout: float) -> None:
        self._fleet, self._system, self._seed, self._dropout = fleet, system, seed, dropout

    def travel(self, client: int, number: int, start: float, stretches: Sequence[Stretch], leaves: float) -> Trip:
        """The device's trip through these stretches.

        Arguments:
            client, number: whose, in which round.
            start: when it begins, in seconds.
            stretches: what it does, in this order.
            leaves: when its hours end, in seconds; infinity where they do not.
        """
        legs: list[tuple[Stretch, float]] = []
        time = start
        for stretch in stretches:
            seconds = self._seconds(client, stretch)
            end = time + seconds
            legs.append((stretch, end))
            after = self._vanishes(stretch.leg, number, client)
            gone = math.inf if after is None else time + seconds * after
            if min(gone, leaves) < end or gone == time:
                why = f"its hours ended while {stretch.leg}" if leaves < gone else f"vanished while {stretch.leg}"
                return Trip(client, start, min(gone, leaves), tuple(legs), why)
            time = end
        return Trip(client, start, time, tuple(legs))

    def _seconds(self, client: int, stretch: Stretch) -> float:
        device, traffic = self._fleet.device(client), stretch.traffic
        seconds = traffic.down / device.down + traffic.up / device.up + stretch.steps * device.seconds_per_step
        return seconds + (self._system.latency if traffic != _NOTHING else 0.0)

    def _vanishes(self, leg: Leg, number: int, client: int) -> float | None:
        """After which share of the stretch the device vanishes, None if it does not."""
        share = self._system.dropouts.get(leg, 0.0)
        gone = share > 0 and drawn_uniform(f"vanishes {leg}", self._seed, number, client) < share
        if leg == "training" and self._dropout:
            # The same draw as without a clock.
            gone = gone or drawn_uniform("dropout", self._seed, number, client) < self._dropout
        return drawn_uniform(f"vanishes {leg} after", self._seed, number, client) if gone else None
