"""Draws each round's devices among those that are there, and times the round."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from archipel.bundle import Bundle, write_weights
from archipel.errors import SimulationError
from archipel.permutations import permuted
from archipel.protocol.narrow import masked_size
from archipel.protocol.plain import plain_size
from archipel.protocol.uploads import upload_layout
from archipel.simulation.clients import Clients
from archipel.simulation.system.clock import Costs, Outcome, required, run_round
from archipel.simulation.system.devices import Fleet
from archipel.simulation.system.trips import Traveller
from archipel.strategies.update_compression import carried

if TYPE_CHECKING:
    from archipel.simulation.rounds import RoundSettings

_CHUNK = 1024
_PERIODS = 3
"""A round begins within so many periods, or never: hours repeat every period."""


class Flight(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Devices at work in an asynchronous task, which began together: one, or the group of a secure round. `version` is
    the number of versions made before they began at `start`; their draws and states go by `number`."""

    clients: tuple[int, ...]
    version: int
    number: int
    start: float


class ClockState(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Seconds since the run began, and until when devices are busy with a round that is over.

    Of an asynchronous task: the `flights`, the devices `seated` since the newest version, and the number of `draws`.
    """

    time: float = 0.0
    busy: dict[int, float] = {}
    flights: list[Flight] = []
    seated: list[int] = []
    draws: int = 0


class Seating:
    """Chooses devices that are there and idle, each at most once."""

    def __init__(self, fleet: Fleet, population: int, seed: int, period: float) -> None:
        self._fleet, self._population, self._seed, self._period = fleet, population, seed, period

    def choose(self, number: int, time: float, most: int, taken: Callable[[int], bool], phase: int = 0) -> list[int]:
        """At most `most` of them, in the order in which this draw comes upon them."""
        found: list[int] = []
        for client in self._order(number, most, phase):
            if not taken(client) and self._fleet.arrival(client, time) == time:
                found.append(client)
                if len(found) == most:
                    break
        return found

    def next_time(
        self, time: float, busy: Mapping[int, float], missing: int, taken: Callable[[int], bool] | None = None
    ) -> float:
        """Before when at most `missing` - 1 more devices are there; infinity if fewer ever come."""
        times = sorted(
            moment
            for client in range(self._population)
            if not (taken and taken(client))
            and (moment := self._fleet.arrival(client, max(time, busy.get(client, 0.0)))) > time
        )
        return times[missing - 1] if len(times) >= missing else float("inf")

    def _order(self, number: int, most: int, phase: int) -> Iterator[int]:
        # The first part is that of `draw_cohort`, so devices that are always there are drawn as without a clock.
        start, size = 0, min(most, self._population)
        while start < self._population:
            positions = np.arange(start, min(start + size, self._population))
            yield from permuted(positions, self._population, self._seed, phase, number).tolist()
            start, size = start + size, _CHUNK


class RoundClock:
    """Times the rounds of a run whose devices begin together.

    Arguments:
        bundle: says how many steps and bytes a round takes.
        clients: how many examples each device has.
        settings: with a system.
        broadcast: bytes that devices fetch beside the parameters.
    """

    def __init__(self, bundle: Bundle, clients: Clients, settings: RoundSettings, broadcast: int) -> None:
        system = settings.system
        assert system is not None
        self.settings, self.pacing = settings, settings.pacing
        self.fleet = Fleet(system, settings.seed)
        self.traveller = Traveller(self.fleet, system, settings.seed, settings.dropout)
        self.costs = costs_of(bundle, clients, settings, broadcast)
        self.seating = Seating(self.fleet, len(clients), settings.seed, system.period)
        self._period = system.period

    def run(self, number: int, state: ClockState) -> tuple[list[int], Outcome]:
        """Time the round, and take the clock to its end. Returns who was drawn, ascending, and what came of it."""
        drawn = self._draw(number, state)
        outcome = run_round(self.fleet, self.traveller, self.pacing, self.costs, number, state.time, drawn)
        busy = {**state.busy, **outcome.busy}
        state.time = outcome.end
        state.busy = {client: until for client, until in sorted(busy.items()) if until > outcome.end}
        return drawn, outcome

    def _draw(self, number: int, state: ClockState) -> list[int]:
        cohort = self.settings.cohort
        needed = required(self.pacing, cohort, "updating", bool(self.costs.seats))
        latest = state.time + _PERIODS * self._period + max(state.busy.values(), default=0.0)
        while True:
            busy = {client for client, until in state.busy.items() if until > state.time}
            found = self.seating.choose(number, state.time, cohort, busy.__contains__)
            if len(found) >= needed:
                return sorted(found)
            state.time = self.seating.next_time(state.time, state.busy, needed - len(found))
            if state.time > latest:
                raise SimulationError(
                    f"system: round {number} needs {needed} devices, and never so many are there at once; lower the "
                    "cohort, or give the devices longer hours"
                )


def costs_of(bundle: Bundle, clients: Clients, settings: RoundSettings, broadcast: int) -> Costs:
    """What a device's part costs; `broadcast` is the size in bytes of what is fetched beside the parameters."""
    manifest = bundle.manifest
    layout = upload_layout(manifest, "training")
    secure = settings.privacy == "secure"
    bits = layout.modulus_bits(settings.cohort) if secure else 0
    update = (
        masked_size(layout, settings.cohort, bits, narrow=bool(carried(manifest))) if secure else plain_size(layout)
    )

    def steps(client: int) -> int:
        count = clients.count(client)
        return sum(
            phase.steps or 0 if phase.epochs is None else phase.epochs * -(-count // phase.batch_size)
            for phase in manifest.schedule
        )

    return Costs(
        weights=len(write_weights(bundle.parameters())) + broadcast,
        update=update,
        steps=steps,
        seats=settings.cohort if secure else 0,
    )
