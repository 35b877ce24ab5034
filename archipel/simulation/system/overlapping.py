"""Asynchronous tasks on a virtual clock: versions are made while devices work (FedBuff, Nguyen et al. 2022).

Plain: up to `concurrency` devices work at once, each from the version that was newest when it began, and every `cohort`
of their updates make a version (`archipel/server/rounds/buffers.py`). Secure: groups of `cohort` devices have rounds of
their own, which overlap. What happens when follows from the seed alone and from what the clock's state holds, so a run
that was killed goes on as it would have gone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from archipel.bundle import Bundle
from archipel.errors import SimulationError
from archipel.simulation.clients import Clients
from archipel.simulation.rounds import RoundRow, Rounds, RoundSettings, Standing
from archipel.simulation.several import SeveralModels
from archipel.simulation.system.clock import Outcome, run_round
from archipel.simulation.system.round_clock import Flight, RoundClock
from archipel.simulation.system.traffic import Traffic
from archipel.simulation.system.trips import Stretch, Trip
from archipel.simulation.work import Engine, Partial, Report
from archipel.strategies.strategy import Began
from archipel.strategies.update_compression import carried

_SEATS = 1
"""The phase of the draws of seats; rounds draw their cohorts with phase 0."""


@dataclass
class _Buffer:
    """What came for the next version: updates that wait for their training, those that are in the sum, and reports."""

    waiting: list[Flight] = field(default_factory=list)
    partial: Partial | None = None
    reports: list[Report] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)
    began: int = 0
    """The version with which the last update began."""

    @property
    def counted(self) -> int:
        return len(self.waiting) + (0 if self.partial is None else self.partial.counted)


class OverlappingRounds(Rounds):
    """Rounds of an asynchronous task. Each row is a version, or a round that failed.

    Raises SimulationError for a strategy whose updates must begin with the same version, as the server does.
    """

    def __init__(
        self,
        bundle: Bundle,
        population: int,
        settings: RoundSettings,
        standing: Standing | None,
        clients: Clients | None = None,
        models: SeveralModels | None = None,
    ) -> None:
        super().__init__(bundle, population, settings, standing, clients, models)
        if carried(self._bundle.manifest):
            raise SimulationError(
                "mode: devices of an asynchronous task begin with different versions, and each version rotates updates "
                "by a seed of its own; leave the option compress out"
            )
        if self._clock is None:
            raise SimulationError("mode: asynchronous needs a system, whose clock says who comes first")
        self._timing: RoundClock = self._clock
        self._saved, self._safe = -1, 0
        self._trips: dict[Flight, Trip] = {}
        self._outcomes: dict[Flight, Outcome] = {}

    def run(self, engine: Engine, saved: int = 0) -> tuple[RoundRow, list[Report]]:
        """The next version, or the next round that fails."""
        state = self.standing.clock
        if saved != self._saved:
            # The run may go on from here with these devices at work: their states before are needed again.
            newest = state.draws if self._bits is not None else len(self.standing.rows)
            self._saved, self._safe = saved, min([newest + 1, *(flight.number for flight in state.flights)]) - 1
        row = RoundRow(number=len(self.standing.rows) + 1, drawn=0, devices=0)
        run = self._run_buffer if self._bits is None else self._run_group
        reports = run(row, engine)
        row.time = state.time
        if not row.failed:
            # A device gives one update for each version that it begins with.
            state.seated = []
        needed = {flight.version for flight in state.flights}
        self.standing.past = {version: kept for version, kept in self.standing.past.items() if version in needed}
        row.drawn = len(reports)
        return row, sorted(reports, key=lambda report: report.client)

    @property
    def _version(self) -> int:
        return sum(not row.failed for row in self.standing.rows)

    def _run_buffer(self, row: RoundRow, engine: Engine) -> list[Report]:
        state, pacing, cohort = self.standing.clock, self._settings.pacing, self._settings.cohort
        latest = state.time + pacing.deadlines.get("buffering", math.inf)
        buffer, version, moved = _Buffer(), self._version, [0.0, 0.0]
        while True:
            free = (pacing.concurrency or 2 * cohort) - len(state.flights)
            missing = free - self._seat_devices(free, version, row.number)
            flight = min(state.flights, key=self._order, default=None)
            ends = math.inf if flight is None else self._seat_ends(flight)
            comes = self._next_arrival() if missing else math.inf
            if min(ends, comes) > latest or min(ends, comes) == math.inf:
                state.time = latest if latest < math.inf else state.time
                self._train(buffer, version, engine)
                if buffer.counted < max(1, pacing.min_cohort):
                    row.failed = (
                        f"{buffer.counted} updates arrived, {max(1, pacing.min_cohort)} needed, and no more come"
                    )
                    # As with a new round of the server: devices that gave their update may begin again.
                    state.seated = []
                break
            state.time = min(ends, comes)
            if flight is None or comes < ends:
                continue
            state.flights.remove(flight)
            self._take(flight, buffer, version, moved)
            if buffer.counted == cohort:
                self._train(buffer, version, engine)
                if buffer.counted == cohort:
                    break
        row.bytes_down, row.bytes_up = round(moved[0]), round(moved[1])
        row.stale = sum(buffer.staleness) / len(buffer.staleness) if buffer.staleness else 0.0
        partial = buffer.partial or Partial(self._work(row.number, self._safe).empty_sum())
        self._conclude(row, partial, began=self._began(buffer, version) if cohort == 1 and buffer.partial else None)
        return buffer.reports

    def _began(self, buffer: _Buffer, version: int) -> Began:
        """What the device of the one update began with."""
        staleness = version - buffer.began
        return Began(
            self.standing.past[buffer.began], staleness, (1.0 + staleness) ** -self._settings.pacing.staleness_exponent
        )

    def _take(self, flight: Flight, buffer: _Buffer, version: int, moved: list[float]) -> None:
        """Put what a device sent into the buffer, or note why it sent nothing."""
        trip, pacing = self._trip(flight), self._settings.pacing
        for place, part in enumerate(trip.moved(self._seat_ends(flight))):
            moved[place] += part
        del self._trips[flight]
        staleness = version - flight.version
        if not trip.arrived or trip.end > self.standing.clock.time:
            buffer.reports.append(Report(trip.client, left=trip.left or "late in phase updating"))
        elif staleness > pacing.max_staleness:
            buffer.reports.append(Report(trip.client, left=f"{staleness} versions were made meanwhile"))
        else:
            buffer.waiting.append(flight)

    def _train(self, buffer: _Buffer, version: int, engine: Engine) -> None:
        """The local rounds of those that wait, together where they began together."""
        groups: dict[tuple[int, int], list[int]] = {}
        for flight in buffer.waiting:
            groups.setdefault((flight.number, flight.version), []).extend(flight.clients)
        buffer.waiting = []
        for (number, began), clients in sorted(groups.items()):
            partial = self._run_clients(engine, number, began, version - began, sorted(clients))
            buffer.staleness += [version - began] * partial.counted
            buffer.reports += partial.reports
            buffer.began = began
            if buffer.partial is None:
                buffer.partial = partial
            else:
                buffer.partial.merge(partial)

    def _run_group(self, row: RoundRow, engine: Engine) -> list[Report]:
        """The secure round of the group that is done first."""
        state, pacing, version = self.standing.clock, self._settings.pacing, self._version
        most = pacing.concurrency or 2 * self._settings.cohort
        while True:
            while (len(state.flights) + 1) * self._settings.cohort <= most and self._seat_group(version):
                pass
            flight = min(state.flights, key=self._order, default=None)
            ends = math.inf if flight is None else self._outcome(flight).end
            full = (len(state.flights) + 1) * self._settings.cohort > most
            comes = math.inf if full else self._next_arrival()
            if min(ends, comes) == math.inf:
                raise SimulationError("system: never so many devices are there at once as a group has, the cohort")
            state.time = min(ends, comes)
            if flight is not None and ends <= comes:
                break
        state.flights.remove(flight)
        outcome = self._outcomes.pop(flight)
        row.failed, row.bytes_down, row.bytes_up = outcome.failed, round(outcome.down), round(outcome.up)
        state.busy = {client: until for client, until in {**state.busy, **outcome.busy}.items() if until > state.time}
        made = sum(not each.failed and each.time <= outcome.masks for each in self.standing.rows)
        row.stale = made - flight.version
        if row.stale > pacing.max_staleness and not row.failed:
            row.failed = f"{made - flight.version} versions were made meanwhile, the task allows {pacing.max_staleness}"
        counted = [] if row.failed else outcome.counted
        gone = tuple(client for client in flight.clients if client not in counted)
        partial = self._run_clients(engine, flight.number, flight.version, made - flight.version, counted, gone)
        left = [Report(client, left=outcome.left.get(client, row.failed)) for client in gone]
        self._conclude(row, partial)
        return [*left, *partial.reports]

    def _run_clients(
        self,
        engine: Engine,
        number: int,
        version: int,
        staleness: int,
        clients: Sequence[int],
        dropped: tuple[int, ...] = (),
    ) -> Partial:
        work = replace(
            self._work(number, self._safe),
            parameters=self.standing.past[version],
            staleness=staleness,
            staleness_exponent=self._settings.pacing.staleness_exponent,
            dropped=dropped,
        )
        return engine.run(work, clients) if clients else Partial(work.empty_sum())

    def _seat_devices(self, free: int, version: int, number: int) -> int:
        """Give free seats to devices that are there; how many got one."""
        found = self._choose(free)
        self.standing.clock.seated += found
        for client in found:
            self._begin((client,), version, number)
        return len(found)

    def _seat_group(self, version: int) -> bool:
        cohort = self._settings.cohort
        found = self._choose(cohort)
        if len(found) == cohort:
            self._begin(tuple(sorted(found)), version, self.standing.clock.draws)
        return len(found) == cohort

    def _begin(self, clients: tuple[int, ...], version: int, number: int) -> None:
        state = self.standing.clock
        self.standing.past.setdefault(version, self.standing.parameters)
        state.flights.append(Flight(clients=clients, version=version, number=number, start=state.time))

    def _choose(self, most: int) -> list[int]:
        state = self.standing.clock
        if not most:
            return []
        taken = self._taken()
        found = self._timing.seating.choose(state.draws + 1, state.time, most, taken.__contains__, _SEATS)
        state.draws += bool(found)
        return found

    def _taken(self) -> set[int]:
        state = self.standing.clock
        working = {client for flight in state.flights for client in flight.clients}
        return working | set(state.seated) | {client for client, until in state.busy.items() if until > state.time}

    def _next_arrival(self) -> float:
        """When a device comes that might get a seat."""
        state = self.standing.clock
        if self._timing.fleet.always and not state.busy:
            return math.inf
        working = {client for flight in state.flights for client in flight.clients} | set(state.seated)
        return self._timing.seating.next_time(state.time, state.busy, 1, working.__contains__)

    def _order(self, flight: Flight) -> tuple[float, tuple[int, ...]]:
        return self._seat_ends(flight) if self._bits is None else self._outcome(flight).end, flight.clients

    def _seat_ends(self, flight: Flight) -> float:
        trip, deadline = self._trip(flight), self._settings.pacing.deadlines.get("updating", math.inf)
        if deadline == math.inf:
            return trip.end
        # A server does not learn that a device has vanished; its seat is free again at the deadline.
        return min(trip.end, flight.start + deadline) if trip.arrived else flight.start + deadline

    def _trip(self, flight: Flight) -> Trip:
        if flight not in self._trips:
            timing, client = self._timing, flight.clients[0]
            stretches = [*timing.costs.work(client), Stretch("uploading", Traffic(up=timing.costs.update))]
            leaves = timing.fleet.departure(client, flight.start)
            self._trips[flight] = timing.traveller.travel(client, flight.number, flight.start, stretches, leaves)
        return self._trips[flight]

    def _outcome(self, flight: Flight) -> Outcome:
        if flight not in self._outcomes:
            timing = self._timing
            self._outcomes[flight] = run_round(
                timing.fleet, timing.traveller, timing.pacing, timing.costs, flight.number, flight.start,
                flight.clients,
            )  # fmt: skip
        return self._outcomes[flight]
