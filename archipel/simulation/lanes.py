"""The local rounds of many devices at once: their weights are stacked, and each step is one run for all of them.

It pays for small models, whose step costs less arithmetic than calls. A step whose devices have batches of different
sizes, or of which some are done, runs once for each size with the devices that have it; so every device makes the very
steps of a round of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from archipel.bundle import Bundle, Phase
from archipel.bundle.roles import (
    Count,
    Example,
    ExampleWeight,
    Feature,
    Metric,
    Noise,
    Parameter,
    Personal,
    Port,
    Seed,
    State,
    Step,
    Update,
)
from archipel.errors import ArchipelError, IndexRangeError, SimulationError, TrainingError
from archipel.lite_runtime import DeviceState
from archipel.lite_runtime.engines.delegates import Delegates
from archipel.lite_runtime.engines.sessions import Sessions
from archipel.lite_runtime.fields import FIELD_ROLES, collect
from archipel.lite_runtime.out_of_range import locate
from archipel.lite_runtime.shuffle import batches
from archipel.lite_runtime.training.driver import data_ports, find_program, need_program
from archipel.lite_runtime.training.features import DEFAULT_BUDGET, find_features
from archipel.lite_runtime.training.loop import MOVING, port_key, port_moves
from archipel.lite_runtime.values import Values
from archipel.protocol.bounds import weight_port
from archipel.protocol.metrics.training_metrics import lane_training_arrays
from archipel.simulation.at_once.features import LaneFeatures
from archipel.simulation.at_once.means import Mean
from archipel.simulation.clients import Clients, SplitClients
from archipel.simulation.draws import device_seed
from archipel.simulation.lane_program import Rows, open_lane_engine
from archipel.simulation.states import States
from archipel.simulation.work import Partial, Report, Work

MOST_LANES = 64
"""More devices go one group after the other: the weights and gradients of all lanes are in memory at once."""

Tensors = dict[tuple[type[Port], str], Any]
"""Held by the engine, `[lanes, ...]`."""


@dataclass
class _Group:
    """Devices that run together: their numbers, the stacked tensors, and what their rounds have given so far."""

    numbers: list[int]
    seeds: list[int]
    counts: list[int]
    states: list[DeviceState]
    arrays: Mapping[str, Any]
    rows: Rows
    values: Values
    """What is the same for all: hyperparameters, broadcast, start."""
    own: list[Values]
    """Of each device, where the programs read what devices keep or draw; else empty."""
    features: LaneFeatures | None
    examples: Rows
    """The rows of each device in what the features are of."""
    tensors: Tensors = field(default_factory=dict)
    steps: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    constants: dict[tuple[type[Port], str], Any] = field(default_factory=dict)
    """Of those, what a program has read, held by the engine."""
    metrics: dict[str, Mean] = field(default_factory=dict)
    fine: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, bool))


class Lanes:
    """Runs local rounds of many devices at once.

    Arguments: as of OneByOne; `feature_budget` are the bytes of a frozen backbone's features in memory.

    Raises SimulationError for a bundle whose programs cannot run so: graphs of a fixed batch need padding.
    """

    def __init__(
        self,
        bundle: Bundle,
        clients: Clients,
        states: States,
        *,
        threads: int = 1,
        delegates: Delegates = "cpu",
        feature_budget: int = DEFAULT_BUDGET,
    ) -> None:
        self._bundle, self._clients, self._states = bundle, clients, states
        self._finish = need_program(bundle, "finish", "take part in a round")
        self._begin = find_program(bundle, "begin")
        schedule = bundle.manifest.schedule
        if not schedule:
            raise SimulationError(f"bundle {bundle.manifest.name!r} has no schedule, so no local round")
        names = [*(phase.program for phase in schedule), self._finish, *([self._begin] if self._begin else [])]
        for name in names:
            check_ports(name, bundle.program(name).inputs)
        bundle.inspect_graphs()
        self._ports = {name: bundle.program(name) for name in dict.fromkeys(names)}
        try:
            self._engine = open_lane_engine(delegates, threads)
            self._programs = {name: self._engine.open(bundle, name) for name in self._ports}
        except TrainingError as error:
            raise SimulationError(str(error)) from None
        ports = [port for each in self._ports.values() for port in each.inputs]
        self._own = any(isinstance(port, Personal | State | Noise) for port in ports)
        self._fields = data_ports(bundle, schedule)
        self._read_fields = {port.name for port in ports if isinstance(port, FIELD_ROLES)}
        self._backbone = find_features(bundle, self._ports)
        self._sessions = Sessions(bundle, threads, delegates)
        self._budget = feature_budget
        self._features: LaneFeatures | None = None
        if isinstance(clients, SplitClients):
            # Once for all: every client's rows are of these arrays.
            first = {name: array[:1] for name, array in clients.arrays.items()}
            collect("data, the first example", self._fields, first, None)
            if self._backbone is not None:
                # An example's features are the same in all rounds.
                self._features = LaneFeatures(bundle, self._backbone, self._sessions, clients.arrays, feature_budget)

    def with_states(self, states: States) -> Lanes:
        """The same engine, with its open sessions, for devices that keep other states."""
        other = copy.copy(self)
        other._states = states
        return other

    def close(self) -> None:
        """Forget the features."""
        if self._features is not None:
            self._features.close()

    def run(self, work: Work, clients: Sequence[int]) -> Partial:
        """The sum of these devices' updates. Raises SimulationError that names the client whose examples do not fit."""
        partial = Partial(work.empty_sum())
        for first in range(0, len(clients), MOST_LANES):
            self._run_group(work, list(clients[first : first + MOST_LANES]), partial)
        return partial

    def _run_group(self, work: Work, numbers: list[int], partial: Partial) -> None:
        group = self._gather(work, numbers)
        lanes = len(numbers)
        try:
            if self._begin is not None:
                self._run(self._begin, group, np.arange(lanes), {})
            used = [0] * lanes
            for number, phase in enumerate(self._bundle.manifest.schedule):
                self._run_phase(phase, number, group, used)
            group.counts = used
            outputs = self._run(self._finish, group, np.arange(lanes), {})
        except IndexRangeError as error:
            raise self._of_client(error, work, group, numbers) from None
        except ArchipelError as error:
            raise SimulationError(f"clients {numbers[0]} to {numbers[-1]}, round {work.number}: {error}") from None
        finally:
            if group.features is not None and group.features is not self._features:
                group.features.close()
        self._report(work, group, outputs, partial)

    def _of_client(self, error: IndexRangeError, work: Work, group: _Group, numbers: list[int]) -> SimulationError:
        """The error that names the client, and the rows of its own examples, that have a number out of range."""
        for number, rows in zip(numbers, group.rows):
            found = locate(error, self._bundle, {name: array[rows] for name, array in group.arrays.items()})
            if found.located:
                return SimulationError(f"client {number}, round {work.number}: {found}")
        return SimulationError(f"clients {numbers[0]} to {numbers[-1]}, round {work.number}: {error}")

    def _gather(self, work: Work, numbers: list[int]) -> _Group:
        clients = self._clients
        rows: list[NDArray[np.int64]] = []
        if isinstance(clients, SplitClients):
            arrays: Mapping[str, NDArray[Any]] = clients.arrays
            rows = [clients.rows(number) for number in numbers]
            empty = [number for number, each in zip(numbers, rows) if not len(each)]
            if empty:
                raise SimulationError(f"client {empty[0]}, round {work.number}: local data: no examples")
        else:
            taken, start = [], 0
            for number in numbers:
                try:
                    fields = collect("local data", self._fields, clients.take(number), None)
                except ArchipelError as error:
                    raise SimulationError(f"client {number}, round {work.number}: {error}") from None
                taken.append(fields.arrays)
                rows.append(np.arange(start, start + fields.count))
                start += fields.count
            arrays = {name: np.concatenate([each[name] for each in taken]) for name in taken[0]}
        seeds = [device_seed(work.seed, work.number, number) for number in numbers]

        def values(state: DeviceState, seed: int) -> Values:
            return Values(
                self._bundle, work.parameters, state, broadcast=work.broadcast, hyperparameters=work.hyperparameters,
                seed=seed,
            )  # fmt: skip

        states = [self._states.load(number, work.number) for number in numbers] if self._own else []
        own = [values(state, seed) for state, seed in zip(states, seeds)]
        counts = [len(each) for each in rows]
        shared = own[0] if own else values(DeviceState(), 0)
        features = self._features
        if self._backbone is not None and features is None:
            features = LaneFeatures(self._bundle, self._backbone, self._sessions, arrays, self._budget)
        read = {name: array for name, array in arrays.items() if name in self._read_fields}
        placed, where = self._engine.place(read, rows)
        group = _Group(numbers, seeds, counts, states, placed, where, shared, own, features, rows)
        group.steps = np.zeros(len(numbers), np.int64)
        group.fine = np.ones(len(numbers), bool)
        return group

    def _run_phase(self, phase: Phase, number: int, group: _Group, used: list[int]) -> None:
        program = self._ports[phase.program]
        chosen = None if phase.moves is None else set(phase.moves)
        orders = [
            list(
                batches(
                    count, phase.batch_size, epochs=phase.epochs, steps=phase.steps, shuffle=True,
                    seed=seed, phase=number, whole=False,
                )
            )
            for count, seed in zip(group.counts, group.seeds)
        ]  # fmt: skip
        for lane, order in enumerate(orders):
            seen = min(group.counts[lane], sum(len(batch.indices) for batch in order))
            used[lane] = max(used[lane], seen)
        metrics = [port.name for port in program.outputs if isinstance(port, Metric)]
        reads = any(isinstance(port, Feature) for port in program.inputs)
        measured = []
        for lanes, chosen_rows in _steps([[batch.indices for batch in order] for order in orders]):
            at = np.stack([group.rows[lane][each] for lane, each in zip(lanes, chosen_rows)])
            feed: dict[str, Any] = {}
            if reads and group.features is not None:
                feed |= group.features.take(
                    np.stack([group.examples[lane][each] for lane, each in zip(lanes, chosen_rows)])
                )
            for port in program.inputs:
                if not isinstance(port, FIELD_ROLES):
                    continue
                array = group.arrays.get(port.name)
                if array is None and isinstance(port, ExampleWeight):
                    feed[port.name] = np.ones((*at.shape, *map(int, port.shape[1:])), port.dtype)
                elif array is not None:
                    feed[port.name] = self._engine.take(array, at)
            outputs = self._run(phase.program, group, lanes, feed, chosen)
            measured.append((lanes, {each: outputs[each] for each in metrics}, at.shape[1]))
            group.steps[lanes] += 1
        # Only now, since a device need not wait for each step's numbers.
        for lanes, outputs, size in measured:
            self._measure(program.outputs, group, lanes, outputs, size)

    def _measure(
        self, ports: Sequence[Any], group: _Group, lanes: NDArray[np.int64], outputs: Mapping[str, Any], rows: int
    ) -> None:
        for port in ports:
            if isinstance(port, Metric):
                count = len(group.numbers)
                mean = group.metrics.setdefault(port.name, Mean(port.reduction, np.zeros(count), np.zeros(count)))
                values = self._engine.fetch(outputs[port.name])
                mean.add(lanes, values, rows)
                if port.name == "loss":
                    group.fine[lanes] &= np.isfinite(values)

    def _run(
        self,
        name: str,
        group: _Group,
        lanes: NDArray[np.int64],
        feed: dict[str, Any],
        chosen: set[str] | None = None,
    ) -> dict[str, Any]:
        """Run a program for these lanes, and keep in the group what it moves."""
        program = self._ports[name]
        whole = len(lanes) == len(group.numbers)
        for port in program.inputs:
            if port.name not in feed:
                feed[port.name] = self._read(port, group, lanes, whole)
        outputs = self._programs[name].run(feed, len(lanes))
        for written in program.outputs:
            if not isinstance(written, MOVING) or not port_moves(written, chosen):
                continue
            if whole:
                group.tensors[port_key(written)] = outputs[written.name]
            else:
                held = group.tensors.get(port_key(written))
                if held is None:
                    held = self._first(written, group)
                group.tensors[port_key(written)] = self._engine.put(held, lanes, outputs[written.name])
        return outputs

    def _read(self, port: Port, group: _Group, lanes: NDArray[np.int64], whole: bool) -> Any:
        if isinstance(port, MOVING):
            if isinstance(port, State) and port.lifetime == "step":
                return self._engine.take(self._first(port, group), lanes)
            held = group.tensors.get(port_key(port))
            if held is None:
                held = group.tensors[port_key(port)] = self._first(port, group)
            return held if whole else self._engine.take(held, lanes)
        if isinstance(port, Noise):
            # Each device draws by itself, as it would alone.
            return np.stack([group.own[lane].read(port) for lane in lanes])
        if isinstance(port, Seed):
            return np.array(group.seeds, np.uint32)[lanes].astype(port.dtype)
        if isinstance(port, Step):
            return group.steps[lanes].astype(port.dtype)
        if isinstance(port, Count):
            counted = np.array(group.counts) if port.of == "examples" else group.steps
            return counted[lanes].astype(port.dtype)
        key = type(port), port.name
        if key not in group.constants:
            group.constants[key] = self._engine.hold(group.values.read(port))
        return group.constants[key]

    def _first(self, port: Port, group: _Group) -> Any:
        """What a tensor is before any step, for all lanes."""
        if isinstance(port, Parameter):
            return self._engine.repeat(group.values.read(port), len(group.numbers))
        return self._engine.hold(np.stack([values.read(port) for values in group.own]))

    def _report(self, work: Work, group: _Group, outputs: Mapping[str, Any], partial: Partial) -> None:
        program = self._bundle.program(self._finish)
        update = {port.name: outputs[port.name] for port in program.outputs if isinstance(port, Update)}
        for held in update.values():
            group.fine &= self._engine.find_finite(held)
        weight = weight_port([port for port in program.outputs if isinstance(port, Update)])
        weights = {} if weight is None else {weight.name: self._engine.fetch(update[weight.name])}
        # A loss that was not finite in some step is in no mean, so it is looked for here.
        metrics = {name: mean.reduced() for name, mean in group.metrics.items()}
        counted = [port.name for port in program.outputs if isinstance(port, Metric)]
        metrics |= {name: self._engine.fetch(outputs[name]).astype(np.float64) for name in counted}
        own, told = lane_training_arrays(self._bundle.manifest, program, weights, metrics, len(group.numbers))
        kept = np.flatnonzero(group.fine & told)
        losses = metrics.get("loss")
        for lane, number in enumerate(group.numbers):
            report = Report(number, group.counts[lane], int(group.steps[lane]))
            partial.reports.append(report)
            if group.fine[lane] and told[lane]:
                report.loss = None if losses is None else float(losses[lane])
            else:
                report.left = "a loss, a metric or an update is not finite"
        self._keep(work, group, kept.tolist())
        if len(kept):
            numbers = [group.numbers[lane] for lane in kept]
            partial.total.add_lanes({**update, **own}, kept, numbers, self._engine)

    def _keep(self, work: Work, group: _Group, lanes: Sequence[int]) -> None:
        """What outlives the round goes into the states of these devices."""
        if not group.own:
            return
        written: dict[Personal | State, NDArray[Any]] = {}
        for program in self._ports.values():
            for port in program.outputs:
                if isinstance(port, Personal | State) and port_key(port) in group.tensors:
                    written[port] = self._engine.fetch(group.tensors[port_key(port)])
        for lane in lanes:
            values = group.own[lane]
            for port, array in written.items():
                values.write(port, array[lane].copy())
            values.keep()
            self._states.save(group.numbers[lane], work.number, group.states[lane], work.saved)


def check_ports(name: str, ports: Sequence[Port]) -> None:
    """Raises SimulationError for inputs that have no lanes."""
    for port in ports:
        if isinstance(port, Example | Feature) and isinstance(port.shape[0], int):
            raise SimulationError(f"program {name!r} is made for batches of {port.shape[0]}")


def _steps(orders: list[list[NDArray[np.int64]]]) -> Iterator[tuple[NDArray[np.int64], list[NDArray[np.int64]]]]:
    """For each step the lanes and their rows, for each size of batch by itself."""
    for step in range(max(map(len, orders), default=0)):
        sizes: dict[int, list[int]] = {}
        for lane, order in enumerate(orders):
            if step < len(order):
                sizes.setdefault(len(order[step]), []).append(lane)
        for lanes in sizes.values():
            yield np.array(lanes), [orders[lane][step] for lane in lanes]
