"""The federations that are audited: small devices with digits of one writer each, and rounds of the real simulator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

import archipel
from archipel.bundle import Bundle, PrivacyPolicy, generate_key
from archipel.converter import Signing, Training
from archipel.datasets import digits_by_writer
from archipel.privacy.central import settle
from archipel.protocol.operator.differential_privacy import DifferentialPrivacy
from archipel.simulation import ListedClients
from archipel.simulation.lanes import Lanes
from archipel.simulation.rounds import Rounds, RoundSettings
from archipel.simulation.states import MemoryStates
from archipel.simulation.sums import SecureSum
from archipel.simulation.work import Partial, Report, Work
from archipel.training import losses, optimizers

DIGITS, SIDE, HIDDEN = 3, 14, 32
"""Of a device; of a picture, in pixels; of the network, in units."""
EPSILON, DELTA = 8.0, 1e-6
CLIP = 2.0

Tensors = Mapping[str, NDArray[Any]]
Client = tuple[NDArray[np.float32], NDArray[np.int64]]


@dataclass(frozen=True)
class Devices:
    """`clients`: the examples of each, of one writer. `test`: digits of no device."""

    clients: list[Client]
    test: Client


@dataclass(frozen=True)
class Trained:
    """A federation's model: its parameters by name, its accuracy on the test digits, and what it cost."""

    parameters: Tensors
    accuracy: float
    epsilon: float | None


def make_devices(count: int, digits: int = DIGITS, side: int = SIDE, test: int = 3000) -> Devices:
    """So many devices with so many digits each, drawn from all writers of the package; a writer has several devices.

    Pictures are float32 [digits, side * side], means of squares of the 28 x 28 pixels.
    """
    data, rng = digits_by_writer(), np.random.default_rng(0)
    squares = data.inputs().reshape(len(data), side, 28 // side, side, 28 // side)
    pictures, labels = squares.mean(axis=(2, 4), dtype=np.float32).reshape(len(data), -1), data.targets()
    rows = []
    for writer in np.unique(data.writers):
        own = rng.permutation(np.flatnonzero(data.writers == writer))
        rows += [own[start : start + digits] for start in range(0, len(own) - digits + 1, digits)]
    order = rng.permutation(len(rows))
    if count * digits + test > len(order) * digits:
        raise ValueError(f"count: {count} devices of {digits} digits and {test} for tests are more than there are")
    rest = np.concatenate([rows[place] for place in order[count:]])[:test]
    return Devices([(pictures[rows[k]], labels[rows[k]]) for k in order[:count]], (pictures[rest], labels[rest]))


def make_bundle(folder: Path, *, rate: float, epochs: int, digits: int = DIGITS, side: int = SIDE) -> Bundle:
    """A signed bundle of a network with one hidden layer, whose devices weigh 1 and clip their updates to CLIP."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(side * side, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 10))
    training = Training(
        losses.cross_entropy(), optimizers.sgd(lr=rate), strategy="fedavgm",
        strategy_options={"weighting": "uniform", "clip": CLIP, "value_range": CLIP, "bits": 16},
        epochs=epochs, batch_size=digits,
    )  # fmt: skip
    policy = PrivacyPolicy(modes=("secure",), min_cohort=2, threshold=0.67, max_clip=CLIP, max_bits=16)
    return archipel.convert(
        network, folder / "audited", example=np.zeros((2, side * side), np.float32), training=training, privacy=policy,
        signing=Signing(generate_key()),
    )  # fmt: skip


def noise(rounds: int, epsilon: float = EPSILON) -> DifferentialPrivacy:
    """The least noise with which so many rounds cost epsilon, by the accountant."""
    return settle(DifferentialPrivacy(mechanism="central", epsilon=epsilon, delta=DELTA), rounds)


class Members:
    """An engine whose client k is the k-th member of a federation; `more`, beyond them, are devices that send what
    `extra` says.

    Arguments:
        lanes: the engine of all devices.
        members: the numbers of the federation's.
        extra: adds what the others send to the sum of the members, as of `Canaries.add`.
    """

    def __init__(
        self, lanes: Lanes, members: NDArray[np.int64], extra: Callable[[Work, SecureSum], None] | None = None
    ) -> None:
        self._lanes, self._members, self._extra = lanes, members, extra

    def run(self, work: Work, clients: Sequence[int]) -> Partial:
        trained = [int(self._members[client]) for client in clients if client < len(self._members)]
        partial = self._lanes.run(work, trained)
        if self._extra is not None and isinstance(partial.total, SecureSum):
            self._extra(work, partial.total)
            partial.reports += [Report(client) for client in clients if client >= len(self._members)]
        return partial

    def close(self) -> None:
        """The lanes go on to the next federation."""


class Federations:
    """Federations of one bundle over some of the devices, one after the other; the graphs' sessions are made once."""

    def __init__(self, bundle: Bundle, devices: Devices) -> None:
        self.bundle, self._devices = bundle, devices
        fields = [{"input": pictures, "label": labels} for pictures, labels in devices.clients]
        self.lanes = Lanes(bundle, ListedClients(fields), MemoryStates())

    def train(
        self, members: NDArray[np.int64], cohort: int, rounds: int, privacy: DifferentialPrivacy, seed: int = 0
    ) -> Trained:
        """Rounds of so many members each, drawn for each round. Raises RuntimeError where one failed."""
        course = Rounds(
            self.bundle, len(members),
            RoundSettings(cohort=cohort, seed=seed, differential_privacy=privacy), None,
        )  # fmt: skip
        engine = Members(self.lanes, members)
        for _ in range(rounds):
            epsilon = run_round(course, engine)
        return Trained(dict(course.standing.parameters), self.measure(course.standing.parameters), epsilon)

    def measure(self, parameters: Tensors) -> float:
        """The accuracy on the test digits."""
        pictures, labels = self._devices.test
        return float((answer(parameters, pictures).argmax(axis=1) == labels).mean())


def run_round(course: Rounds, engine: Members) -> float | None:
    """One round. Returns what all rounds have cost. Raises RuntimeError where it failed."""
    row, _ = course.run(engine)
    if row.failed:
        raise RuntimeError(f"round {row.number}: {row.failed}")
    return row.epsilon


def answer(parameters: Tensors, pictures: NDArray[np.float32]) -> NDArray[np.float32]:
    """The network's logits, [pictures, 10]."""
    hidden = np.maximum(pictures @ parameters["0.weight"].T + parameters["0.bias"], 0)
    logits: NDArray[np.float32] = hidden @ parameters["2.weight"].T + parameters["2.bias"]
    return logits
