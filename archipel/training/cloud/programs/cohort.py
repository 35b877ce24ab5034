"""The local rounds of many clients at once on one device, by the programs of their bundle.

The clients' weights are stacked and each step is one run of the program for all of them, in place of a run for each. A
step whose clients have batches of different sizes, or of which some are done, runs once for each size with the clients
that have it; so every client makes the very steps of a round of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from archipel.bundle import Bundle, Phase, Program
from archipel.bundle.roles import ExampleWeight, Feature, Metric, Port, Update
from archipel.engine_registry import Refusal
from archipel.errors import IndexRangeError, TrainingError
from archipel.lite_runtime import DeviceState
from archipel.lite_runtime.fields import Fields
from archipel.lite_runtime.out_of_range import locate
from archipel.lite_runtime.shuffle import batches
from archipel.lite_runtime.training.driver import batch_shape, collect_data, find_program, need_program
from archipel.lite_runtime.training.features import find_features
from archipel.lite_runtime.values import Values
from archipel.training.cloud.ops.types import to_torch
from archipel.training.cloud.programs.engine import find_device, to_numpy
from archipel.training.cloud.programs.features import FeatureProgram
from archipel.training.cloud.programs.lanes import BATCH, MOVING, LaneProgram, has_lanes

Arrays = Mapping[str, np.ndarray]
Tensors = dict[tuple[type[Port], str], torch.Tensor]


@dataclass
class CohortUpdate:
    """The result of a cohort's round.

    Attributes:
        arrays: the sum of what the clients would upload, by the names of `finish`'s update outputs.
        examples: how many examples were used, of all clients together.
        losses: of each client, a float per step, in the order of the clients.
        left_out: clients by number whose update is not finite, and is not in the sum.

    Example: see `archipel.training.cloud.Cohort`.
    """

    arrays: dict[str, np.ndarray]
    examples: int = 0
    losses: list[list[float]] = field(default_factory=list, repr=False)
    left_out: tuple[int, ...] = ()


@dataclass
class _Client:
    """One client's data and what its ports read. `used`: which examples it has trained on."""

    values: Values
    fields: Fields
    used: np.ndarray
    losses: list[float] = field(default_factory=list)


class Cohort:
    """Runs local rounds of a bundle for many clients at once.

    Arguments:
        bundle: with a schedule and `finish`, as `bundle.open_bundle` returns it.
        device: "auto", "cpu", "cuda", "cuda:1" or "mps".
        threads: inside one operator, on the CPU; 0: PyTorch's own number.
        lanes: the most clients at once; more go one group after the other. None: all.

    Features of a frozen backbone are computed once for each example, and stay on the device for the round.

    Raises TrainingError for a bundle whose programs PyTorch cannot run so.

    Example:
        cohort = Cohort(open_bundle("digits.bundle", keys))
        clients = [{"input": x[:50], "label": y[:50]}, {"input": x[50:], "label": y[50:]}]
        update = cohort.local_rounds(clients, seeds=range(len(clients)), hyperparameters={"lr": 0.05})
    """

    def __init__(self, bundle: Bundle, device: str = "auto", threads: int = 0, lanes: int | None = None) -> None:
        schedule = bundle.manifest.schedule
        self._finish = need_program(bundle, "finish", "take part in a round")
        self._begin = find_program(bundle, "begin")
        if not schedule:
            raise TrainingError(f"bundle {bundle.manifest.name!r} has no schedule, so no local round")
        if lanes is not None and lanes < 1:
            raise TrainingError(f"cohort: lanes must be at least 1, is {lanes}")
        bundle.inspect_graphs()
        try:
            self._device = find_device(device)
        except Refusal as refusal:
            raise TrainingError(f"cohort: {refusal}") from None
        self._bundle, self._schedule, self._most = bundle, schedule, lanes
        names = [*(phase.program for phase in schedule), self._finish, *([self._begin] if self._begin else [])]
        # Those that are left in the first phase have made as many steps; a later one begins at different numbers.
        self._own_steps = len(schedule) > 1
        self._programs = {
            name: LaneProgram(bundle, name, self._device, threads, self._own_steps) for name in dict.fromkeys(names)
        }
        features = find_features(bundle, {name: bundle.program(name) for name in names})
        self._features = None if features is None else FeatureProgram(bundle, features, self._device, threads)

    def local_rounds(
        self,
        clients: Sequence[Arrays | tuple[np.ndarray, np.ndarray]],
        seeds: Sequence[int],
        *,
        parameters: Arrays | None = None,
        broadcast: Arrays | None = None,
        hyperparameters: Mapping[str, float] | None = None,
        states: Sequence[DeviceState] | None = None,
    ) -> CohortUpdate:
        """One local round of each client, as `Runtime.local_round` with that client's seed.

        Arguments:
            clients: the data of each: arrays by field name, or (inputs, labels).
            seeds: of each client, 0 to 2**32 - 1; they decide orders and random numbers.
            parameters: all parameters by name, from which all start; None: the bundle's.
            broadcast: tensors by name that the server sends.
            hyperparameters: values by name, within the bounds that the bundle declares.
            states: the state of each client's device, which the round changes; None: new ones.

        Raises RuntimeInputError for data that do not fit, TrainingError for other numbers of seeds or states,
        IndexRangeError, RuntimeProgramError.
        """
        if len(seeds) != len(clients) or (states is not None and len(states) != len(clients)):
            raise TrainingError(f"cohort: {len(clients)} clients need as many seeds and states, got {len(seeds)} seeds")
        start = {**self._bundle.parameters(), **(parameters or {})}
        made = []
        for number, (client, seed) in enumerate(zip(clients, seeds)):
            x, y = client if isinstance(client, tuple) else (client, None)
            fields = collect_data(self._bundle, self._schedule, x, y)
            values = Values(
                self._bundle, start, DeviceState() if states is None else states[number], broadcast=broadcast,
                hyperparameters=hyperparameters, seed=int(seed), examples=fields.count,
            )  # fmt: skip
            made.append(_Client(values, fields, np.zeros(fields.count, bool)))
        result = CohortUpdate({})
        size = self._most or max(len(made), 1)
        for first in range(0, len(made), size):
            self._run_group(made[first : first + size], first, result)
        return result

    def _run_group(self, clients: list[_Client], first: int, result: CohortUpdate) -> None:
        present: Tensors = {}
        features: dict[str, torch.Tensor] = {}
        everyone = list(range(len(clients)))
        if self._begin is not None:
            self._run(self._begin, clients, everyone, present, {})
        for number, phase in enumerate(self._schedule):
            try:
                self._run_phase(phase, number, clients, present, features)
            except IndexRangeError as error:
                raise self._locate(error, clients, first) from None
        for client in clients:
            client.values.examples = int(client.used.sum())
        outputs = self._run(self._finish, clients, everyone, present, {})
        updates = [port.name for port in self._bundle.program(self._finish).outputs if isinstance(port, Update)]
        finite = torch.stack([outputs[name].reshape(len(clients), -1).isfinite().all(1) for name in updates]).all(0)
        for name in updates:
            # Zeros in place of what is left out: NaN times 0 is NaN.
            kept = torch.where(finite.reshape(-1, *[1] * (outputs[name].ndim - 1)), outputs[name], 0)
            total = to_numpy(kept.sum(0, dtype=outputs[name].dtype))
            result.arrays[name] = result.arrays[name] + total if name in result.arrays else total.copy()
        good = finite.tolist()
        result.left_out += tuple(first + index for index, fine in enumerate(good) if not fine)
        for index, client in enumerate(clients):
            result.losses.append(client.losses)
            result.examples += client.values.examples if good[index] else 0
            if good[index]:
                self._keep(client, index, present)

    def _locate(self, error: IndexRangeError, clients: list[_Client], first: int) -> IndexRangeError:
        """The error that names the client whose data have a number that the model does not have."""
        for number, client in enumerate(clients, start=first):
            found = locate(error, self._bundle, client.fields.arrays)
            if found.located:
                return IndexRangeError(f"client {number}: {found}")
        return error

    def _keep(self, client: _Client, index: int, present: Tensors) -> None:
        """What outlives the round goes into the state of the client's device."""
        for program in self._programs.values():
            for port in program.program.outputs:
                if isinstance(port, MOVING) and (key := _key(port)) in present:
                    client.values.write(port, to_numpy(present[key][index]).copy())
        client.values.keep()

    def _run_phase(
        self, phase: Phase, number: int, clients: list[_Client], present: Tensors, features: dict[str, torch.Tensor]
    ) -> None:
        """`features`: of all clients together; the first phase that reads them fills it."""
        program = self._bundle.program(phase.program)
        chosen = None if phase.moves is None else set(phase.moves)
        orders, offsets, total = [], [], 0
        rows: int | None = None
        for client in clients:
            rows, whole = batch_shape(phase, program, client.fields)
            orders.append(
                batches(
                    client.fields.count, phase.batch_size, epochs=phase.epochs, steps=phase.steps, shuffle=True,
                    seed=client.values.seed, phase=number, whole=whole,
                )
            )  # fmt: skip
            offsets.append(total)
            total += client.fields.count
        data = self._join(program, clients)
        if self._features is not None and any(isinstance(port, Feature) for port in program.inputs):
            if not features:
                read = [port.name for port in self._features.program.inputs]
                fields = {name: np.concatenate([client.fields.arrays[name] for client in clients]) for name in read}
                features.update(self._features.run(fields))
            data |= features
        for step in self._steps(orders):
            for size, members in step.items():
                indices = np.zeros((len(members), rows or size), np.int64)
                weights = np.zeros((len(members), rows or size), np.float32)
                for row, (index, batch) in enumerate(members):
                    # Padded with an example that is there, and the weight 0.
                    indices[row] = offsets[index] + batch[0]
                    indices[row, : len(batch)] = offsets[index] + batch
                    weights[row, : len(batch)] = 1
                    clients[index].used[batch] = True
                at, counts = torch.from_numpy(indices).to(self._device), torch.from_numpy(weights).to(self._device)
                feed = {}
                for port in program.inputs:
                    if isinstance(port, ExampleWeight):
                        given = data[port.name][at] if port.name in data else 1.0
                        padding = counts.reshape(*counts.shape, *[1] * (len(port.shape) - 1))
                        full = padding.expand(*counts.shape, *map(int, port.shape[1:]))
                        feed[port.name] = (full * given).to(getattr(torch, port.dtype))
                    elif isinstance(port, BATCH):
                        feed[port.name] = data[port.name][at]
                lanes = [index for index, _ in members]
                self._run(phase.program, clients, lanes, present, feed, chosen)
                for index in lanes:
                    clients[index].values.steps += 1

    def _steps(self, orders: list[Iterator[Any]]) -> Iterator[dict[int, list[tuple[int, np.ndarray]]]]:
        """For each step the clients and their examples, by how many these are."""
        while True:
            step: dict[int, list[tuple[int, np.ndarray]]] = {}
            for index, order in enumerate(orders):
                batch = next(order, None)
                if batch is not None:
                    step.setdefault(len(batch.indices), []).append((index, batch.indices))
            if not step:
                return
            yield step

    def _join(self, program: Program, clients: list[_Client]) -> dict[str, torch.Tensor]:
        """Each field of all clients one after the other, on the device."""
        names = [port.name for port in program.inputs if isinstance(port, BATCH)]
        return {
            name: to_torch(np.concatenate([client.fields.arrays[name] for client in clients])).to(self._device)
            for name in names
            if all(name in client.fields.arrays for client in clients)
        }

    def _run(
        self,
        name: str,
        clients: list[_Client],
        lanes: list[int],
        present: Tensors,
        feed: dict[str, torch.Tensor],
        chosen: set[str] | None = None,
    ) -> dict[str, torch.Tensor]:
        """Run a program for the clients in `lanes`, and keep in `present` what it moves."""
        program = self._bundle.program(name)
        whole = len(lanes) == len(clients)
        at = torch.tensor(lanes, device=self._device)
        full = dict(feed)
        for port in program.inputs:
            if port.name in full:
                continue
            if isinstance(port, MOVING) and (held := present.get(_key(port))) is not None:
                full[port.name] = held if whole else held[at]
            elif has_lanes(port, self._own_steps):
                full[port.name] = self._read(port, clients, lanes, present)
            else:
                # The same for all.
                full[port.name] = to_torch(clients[lanes[0]].values.read(port)).to(self._device)
        outputs = self._programs[name].run(full, len(lanes))
        for written in program.outputs:
            if not isinstance(written, MOVING) or not _moves(written, chosen):
                continue
            key = _key(written)
            if not whole and key not in present:
                self._read(written, clients, lanes, present)
            present[key] = outputs[written.name] if whole else present[key].index_copy(0, at, outputs[written.name])
        losses = next((port.name for port in program.outputs if isinstance(port, Metric) and port.name == "loss"), None)
        if losses is not None and feed:
            for index, loss in zip(lanes, outputs[losses].tolist()):
                clients[index].losses.append(loss)
        return outputs

    def _read(self, port: Port, clients: list[_Client], lanes: list[int], present: Tensors) -> torch.Tensor:
        """What clients have of their own, from what outlives rounds or from the start."""
        if isinstance(port, MOVING) and _moves(port, None):
            # For all at once: clients that come later start from the same.
            everyone = [to_torch(client.values.read(port)) for client in clients]
            present[_key(port)] = torch.stack(everyone).to(self._device)
            return present[_key(port)][torch.tensor(lanes, device=self._device)]
        return torch.stack([to_torch(clients[index].values.read(port)) for index in lanes]).to(self._device)


def _key(port: Port) -> tuple[type[Port], str]:
    return type(port), getattr(port, "tensor", "")


def _moves(port: Any, chosen: set[str] | None) -> bool:
    # As TrainLoop: state of lifetime "step" starts anew with each step, other state always moves.
    if getattr(port, "lifetime", None) is not None:
        return bool(port.lifetime != "step")
    return chosen is None or port.tensor in chosen
