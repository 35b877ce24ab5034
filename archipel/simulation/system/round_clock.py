"""Draws each round's devices among those that are there, and times the round."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from archipel.bundle import Bundle, write_weights
from archipel.errors import SimulationError
from archipel.permutations import permuted
from archipel.protocol.narrow import masked_size
from archipel.protocol.plain import plain_size
from archipel.protocol.secagg_plus.terms import agreement_of
from archipel.protocol.uploads import plan_layout, upload_layout
from archipel.simulation.clients import Clients
from archipel.simulation.secure.noise import plan_noise
from archipel.simulation.secure.protocol import protocol_of_rounds, seats_of, sizes_of_rounds
from archipel.simulation.system.clock import Costs, Outcome, required, run_round
from archipel.simulation.system.devices import Fleet
from archipel.simulation.system.group_clock import run_groups
from archipel.simulation.system.neighbour_traffic import NeighbourTraffic
from archipel.simulation.system.traffic import Traffic
from archipel.simulation.system.trips import Stretch, Traveller, Trip
from archipel.strategies.robust.composing import least_parts
from archipel.strategies.update_compression import carried

if TYPE_CHECKING:
    from archipel.simulation.rounds import RoundSettings
    from archipel.simulation.several import SeveralModels

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
        clients: how many examples each device has; the last one has the server's own, where there are such.
        settings: with a system.
        broadcast: bytes that devices fetch beside the parameters.
        divide: (number of the round, devices) -> the secure group of each, from 0 on.
        models: where devices have different ones.

    Raises SimulationError for a pacing that does not fit the cohort or its groups.
    """

    def __init__(
        self,
        bundle: Bundle,
        clients: Clients,
        settings: RoundSettings,
        broadcast: int,
        divide: Callable[[int, list[int]], Mapping[int, int]],
        models: SeveralModels | None = None,
    ) -> None:
        system = settings.system
        assert system is not None
        if settings.secure_groups:
            settings.pacing.check_groups(settings.cohort, settings.secure_groups)
        else:
            settings.pacing.check(settings.cohort, settings.privacy == "secure")
        self.settings, self.pacing, self._divide = settings, settings.pacing, divide
        sizes = sizes_of_rounds(bundle.manifest, settings)
        if sizes is not None:
            # Each device has as many others as the threshold at least.
            least = max(settings.pacing.min_cohort, sizes.threshold + 1)
            self.pacing = msgspec.structs.replace(settings.pacing, min_cohort=least, threshold=sizes.threshold)
        if settings.secure_groups:
            # A group of fewer devices gives no sum.
            least = max(self.pacing.min_cohort, bundle.manifest.privacy.min_cohort)
            self.pacing = msgspec.structs.replace(self.pacing, min_cohort=least)
        self.fleet = Fleet(system, settings.seed)
        self.traveller = Traveller(self.fleet, system, settings.seed, settings.dropout)
        self.costs = costs_of(bundle, clients, settings, broadcast, models)
        # The server's own examples are on a device beside the others, which is always there and never vanishes.
        population = len(clients) - settings.root
        self._root = population if settings.root else None
        self._steady = Traveller(self.fleet, msgspec.structs.replace(system, dropouts={}), settings.seed, 0.0)
        self._root_bytes = plain_size(upload_layout(bundle.manifest, "training"))
        self.seating = Seating(self.fleet, population, settings.seed, system.period)
        self._period = system.period

    def run(self, number: int, state: ClockState, resting: Collection[int] = ()) -> tuple[list[int], Outcome]:
        """Time the round, and take the clock to its end. Returns who was drawn, ascending, and what came of it.

        `resting`: clients that may not be drawn.
        """
        drawn = self._draw(number, state, resting)
        outcome = self._time(number, state.time, drawn)
        busy = {**state.busy, **outcome.busy}
        state.time = outcome.end
        state.busy = {client: until for client, until in sorted(busy.items()) if until > outcome.end}
        return drawn, outcome

    def _time(self, number: int, start: float, drawn: list[int]) -> Outcome:
        root = None if self._root is None else self._trip_of_root(self._root, number, start)

        def time_devices(devices: Sequence[int], until: float = math.inf) -> Outcome:
            return run_round(
                self.fleet, self.traveller, self.pacing, self.costs, number, start, devices,
                root=0.0 if root is None else root.end, until=until,
            )  # fmt: skip

        if self.settings.secure_groups:
            group_of = self._divide(number, drawn)
            groups = [
                [client for client in drawn if group_of[client] == group] for group in sorted(set(group_of.values()))
            ]
            outcome = run_groups(time_devices, groups, least_parts(self.settings.aggregation))
        else:
            outcome = time_devices(drawn)
        if root is not None:
            self._wait_for_root(outcome, root)
        return outcome

    def _trip_of_root(self, root: int, number: int, start: float) -> Trip:
        stretches = [*self.costs.work(root), Stretch("uploading", Traffic(up=self._root_bytes))]
        return self._steady.travel(root, number, start, stretches, math.inf)

    def _wait_for_root(self, outcome: Outcome, root: Trip) -> None:
        """The round ends with the root's update, at the earliest; at the deadline of phase updating it fails."""
        latest = root.start + self.pacing.deadlines.get("updating", math.inf)
        if not outcome.failed:
            outcome.end = max(outcome.end, min(root.end, latest))
            if root.end > outcome.end:
                outcome.counted, outcome.failed = [], "the root's update was late in phase updating"
        down, up = root.moved(outcome.end)
        outcome.down, outcome.up = outcome.down + down, outcome.up + up
        if root.end > outcome.end:
            outcome.busy[root.client] = root.end

    def _draw(self, number: int, state: ClockState, resting: Collection[int]) -> list[int]:
        cohort, groups = self.settings.cohort, self.settings.secure_groups
        needed = required(self.pacing, self.costs.seats or cohort, "updating", bool(self.costs.seats)) * max(groups, 1)
        if self._root is not None:
            state.time = max(state.time, state.busy.get(self._root, 0.0))
        latest = state.time + _PERIODS * self._period + max(state.busy.values(), default=0.0)
        while True:
            busy = {*resting, *(client for client, until in state.busy.items() if until > state.time)}
            found = self.seating.choose(number, state.time, cohort, busy.__contains__)
            if len(found) >= needed:
                return sorted(found)
            missing = needed - len(found)
            state.time = self.seating.next_time(state.time, state.busy, missing, resting.__contains__)
            if state.time > latest:
                raise SimulationError(
                    f"system: round {number} needs {needed} devices, and never so many are there at once; lower the "
                    "cohort, or give the devices longer hours"
                )


def costs_of(
    bundle: Bundle, clients: Clients, settings: RoundSettings, broadcast: int, models: SeveralModels | None = None
) -> Costs:
    """What a device's part costs; `broadcast` is the size in bytes of what is fetched beside the parameters.

    Raises SimulationError for `model_steps` that are not of these models.
    """
    manifest = bundle.manifest
    layout = upload_layout(manifest, "training")
    secure = settings.privacy == "secure"
    # Of one sum: of a group, or of the cohort.
    seats = seats_of(settings)
    noised = plan_noise(manifest, settings)
    if noised is not None:
        layout = plan_layout(noised, manifest)
    bits, narrow = layout.modulus_bits(seats) if secure else 0, bool(carried(manifest)) or noised is not None
    update = masked_size(layout, seats, bits, narrow=narrow) if secure else plain_size(layout)
    sizes, agreement = sizes_of_rounds(manifest, settings), agreement_of(protocol_of_rounds(manifest, settings))
    bundles = (bundle,) if models is None else models.bundles
    assert settings.system is not None
    factors = settings.system.model_steps or (1.0,) * len(bundles)
    if len(factors) != len(bundles):
        raise SimulationError(f"system: model_steps: {len(factors)} given, for {len(bundles)} models")

    def steps(client: int) -> float:
        count, model = clients.count(client), 0 if models is None else models.of[client]
        return factors[model] * sum(
            phase.steps or 0 if phase.epochs is None else phase.epochs * -(-count // phase.batch_size)
            for phase in bundles[model].manifest.schedule
        )

    return Costs(
        weights=len(write_weights(bundle.parameters())) + broadcast,
        update=update,
        steps=steps,
        seats=seats if secure else 0,
        neighbours=None if sizes is None else NeighbourTraffic(sizes, manifest.privacy.server, agreement),
    )
