"""A round of devices that begin together, on a virtual clock: when each phase ends, and whose updates are in the sum.

The phases, their order and their ends are those of the server (`archipel/server/rounds/machine.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from archipel.protocol.operator.tasks import DeadlinePhase
from archipel.simulation.system import traffic
from archipel.simulation.system.devices import Fleet
from archipel.simulation.system.neighbour_traffic import NeighbourTraffic
from archipel.simulation.system.settings import Pacing
from archipel.simulation.system.traffic import Traffic
from archipel.simulation.system.trips import Stretch, Traveller, Trip

SECURE_PHASES: tuple[DeadlinePhase, ...] = (
    "advertising", "sharing", "complaining", "masking", "confirming", "unmasking",
)  # fmt: skip


@dataclass(frozen=True)
class Costs:
    """What a device's part in a round costs.

    `weights`: bytes of what it fetches; `update`: bytes of what it uploads; `steps`: training steps of a client,
    in steps of the first model; `seats`: devices that a secure round has at most, 0 in plain ones; `neighbours`: of one
    over neighbours its messages.
    """

    weights: int
    update: int
    steps: Callable[[int], float]
    seats: int = 0
    neighbours: NeighbourTraffic | None = None

    def work(self, client: int) -> list[Stretch]:
        """From the plan to the update: what comes first in every round."""
        return [Stretch("fetching", Traffic(down=self.weights)), Stretch("training", steps=self.steps(client))]


@dataclass
class Outcome:
    """A timed round: when it ended, who is in the sum, why others are not, until when devices are busy that the round
    did not wait for, the bytes fetched and uploaded, the staleness time, and why it failed."""

    end: float
    counted: list[int] = field(default_factory=list)
    left: dict[int, str] = field(default_factory=dict)
    busy: dict[int, float] = field(default_factory=dict)
    down: float = 0.0
    up: float = 0.0
    masks: float = 0.0
    """When the masking of a secure round began: devices then learn how stale they are."""
    failed: str = ""


@dataclass
class _Phase:
    name: DeadlinePhase
    alive: list[int]
    sharers: int = 0
    survivors: int = 0


def run_round(
    fleet: Fleet,
    traveller: Traveller,
    pacing: Pacing,
    costs: Costs,
    number: int,
    start: float,
    drawn: Sequence[int],
    *,
    root: float = 0.0,
    until: float = math.inf,
) -> Outcome:
    """The round of these devices, which are all there at its `start`.

    `root`: when the update of a root device comes, before which phase updating does not end but at its deadline.
    `until`: when the round is over whatever its devices do, because the groups beside it failed.
    """
    outcome = Outcome(start)
    leaves = {client: fleet.departure(client, start) for client in drawn}
    phase = _Phase("updating", list(drawn))
    for name in SECURE_PHASES if costs.seats else ("updating",):
        phase.name = name
        began, expected = outcome.end, len(phase.alive)
        if name == "masking":
            outcome.masks = began
        trips = [
            traveller.travel(client, number, began, _stretches(costs, client, phase), leaves[client])
            for client in phase.alive
        ]
        collects = name in ("masking", "updating")
        deadline, goal = began + pacing.deadlines.get(name, math.inf), pacing.goal if collects else None
        outcome.end = _ends(trips, deadline, goal)
        if name == "updating" and min(root, deadline) > outcome.end:
            # Updates that come while the round waits for the root's are in it as well.
            outcome.end, goal = min(root, deadline), None
        if outcome.end > until:
            outcome.end, outcome.counted, outcome.failed = until, [], "too few groups were left"
            _note(outcome, trips, {trip.client for trip in trips if trip.end <= until}, outcome.failed)
            break
        in_time = sorted((trip for trip in trips if trip.arrived and trip.end <= outcome.end), key=_order)
        if goal is not None:
            in_time = in_time[:goal]
        _note(outcome, trips, {trip.client for trip in in_time}, f"late in phase {name}")
        phase.alive = [trip.client for trip in in_time]
        needed = required(pacing, costs.seats or len(drawn), name, bool(costs.seats))
        # Over neighbours who opened no envelopes holds no shares, and nobody masks with it.
        if name == ("sharing" if costs.neighbours is None else "complaining"):
            phase.sharers = len(phase.alive)
        if collects:
            phase.survivors, outcome.counted = len(phase.alive), sorted(phase.alive)
        if len(phase.alive) < needed:
            outcome.counted = []
            outcome.failed = f"{len(phase.alive)} of {expected} devices were in time in phase {name}, {needed} needed"
            break
    return outcome


def _stretches(costs: Costs, client: int, phase: _Phase) -> list[Stretch]:
    members = len(phase.alive)
    if costs.neighbours is not None:
        return _over_neighbours(costs, costs.neighbours, client, phase)
    match phase.name:
        case "updating":
            return [*costs.work(client), Stretch("uploading", Traffic(up=costs.update))]
        case "advertising":
            return [*costs.work(client), Stretch("advertising", traffic.advertising(costs.seats))]
        case "sharing":
            return [Stretch("sharing", traffic.sharing(members, costs.seats))]
        case "complaining":
            return [Stretch("complaining", traffic.complaining(members))]
        case "masking":
            return [Stretch("uploading", Traffic(up=costs.update))]
        case "confirming":
            return [Stretch("confirming", traffic.confirming(members))]
        case _:
            dropped = phase.sharers - phase.survivors
            return [Stretch("unmasking", traffic.unmasking(members, phase.survivors, dropped))]


def _over_neighbours(costs: Costs, messages: NeighbourTraffic, client: int, phase: _Phase) -> list[Stretch]:
    members = len(phase.alive)
    match phase.name:
        case "advertising":
            return [*costs.work(client), Stretch("advertising", messages.advertising())]
        case "sharing":
            return [Stretch("sharing", messages.sharing(members))]
        case "complaining":
            return [Stretch("complaining", messages.complaining(members))]
        case "masking":
            return [Stretch("uploading", Traffic(messages.masking(members).down, costs.update))]
        case "confirming":
            return [Stretch("confirming", messages.confirming(phase.sharers, members))]
        case _:
            return [Stretch("unmasking", messages.unmasking(phase.sharers, phase.survivors))]


def _ends(trips: Sequence[Trip], deadline: float, goal: int | None) -> float:
    """When the phase is over."""
    arrivals = sorted(trip.end for trip in trips if trip.arrived)
    if goal is not None and len(arrivals) >= goal:
        return min(arrivals[goal - 1], deadline)
    if len(arrivals) == len(trips) or deadline == math.inf:
        # Without a deadline the clock knows who has vanished; a server would wait for ever.
        return min(max((trip.end for trip in trips), default=0.0), deadline)
    return deadline


def _note(outcome: Outcome, trips: Sequence[Trip], in_time: set[int], why: str) -> None:
    for trip in trips:
        down, up = trip.moved(outcome.end)
        outcome.down, outcome.up = outcome.down + down, outcome.up + up
        if trip.client not in in_time:
            outcome.left.setdefault(trip.client, trip.left or why)
            if trip.end > outcome.end:
                outcome.busy[trip.client] = trip.end


def _order(trip: Trip) -> tuple[float, int]:
    return trip.end, trip.client


def required(pacing: Pacing, cohort: int, phase: DeadlinePhase, secure: bool) -> int:
    """How many devices must be in time in a phase."""
    threshold = pacing.secret_threshold(cohort) if secure else 1
    if phase == "unmasking":
        return threshold
    if pacing.mode == "synchronous" and phase != "confirming":
        return pacing.goal or cohort
    return max(threshold, pacing.min_cohort)
