"""Canaries: devices that send one update of their own in every round, or zeros, and a guess about each of them.

It is the strongest attack that the bound allows: whoever guesses knows all versions of the model, what every other
device sent, and the canaries. A canary is a change of one parameter by the clip, another parameter for each of them
(the Dirac canaries of Nasr et al. 2023): so each is noticed as much as a device can be, and none hides another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from bounds import Flags, Numbers, epsilon_of_guesses
from federations import CLIP, DELTA, Federations, Members, Tensors, run_round
from numpy.typing import NDArray

from archipel.bundle.roles import Update
from archipel.protocol.bounds import entries, step
from archipel.protocol.operator.differential_privacy import DifferentialPrivacy
from archipel.protocol.vector import Layout
from archipel.simulation.rounds import Rounds, RoundSettings
from archipel.simulation.sums import SecureSum
from archipel.simulation.work import Work

BETA = 0.9
"""Of the strategy's momentum on the server."""


@dataclass(frozen=True)
class Guessed:
    """The scores of all canaries, about 1 of those that took part and 0 of the others; who did; what it cost."""

    scores: Numbers
    taken: Flags
    epsilon: float | None


class Canaries:
    """So many devices, of which each sends its canary with probability 1/2, else zeros, in all rounds.

    Parameters and coins are drawn from `rng`; `size` is the number of parameters.
    """

    def __init__(self, count: int, size: int, rng: np.random.Generator) -> None:
        self.places: NDArray[np.int64] = rng.choice(size, count, replace=False)
        self.taken: Flags = rng.random(count) < 0.5
        self.honest: Numbers = np.zeros(size)
        """The sum of the other devices in the last round."""
        self._sent: NDArray[np.uint32] | None = None

    def add(self, work: Work, total: SecureSum) -> None:
        """Add what the canaries send to the sum of all other devices, which is kept for the guess."""
        bits = work.modulus_bits or 32
        whole = work.layout.signed_sum(
            total.total & np.uint32(2**bits - 1), cohort=work.cohort, modulus_bits=bits
        )  # fmt: skip
        self.honest = _steps(work.layout) * _changes(work.layout, whole)
        if self._sent is None:
            own = SecureSum(work.layout, bits, work.cohort)
            for place in self.places[self.taken]:
                change = np.zeros(self.honest.size)
                change[place] = CLIP
                own.add(_upload(work.layout, change))
            self._sent = own.total
        total.total += self._sent


def run(
    federations: Federations, members: NDArray[np.int64], count: int, rounds: int, privacy: DifferentialPrivacy,
    rng: np.random.Generator,
) -> Guessed:  # fmt: skip
    """Train with so many canaries beside the members, and score each canary."""
    devices = len(members) + count
    course = Rounds(federations.bundle, devices, RoundSettings(cohort=devices, differential_privacy=privacy), None)
    layout = course.first_work().layout
    canaries = Canaries(count, len(_steps(layout)), rng)
    engine = Members(federations.lanes, members, canaries.add)
    scores, momentum, epsilon = np.zeros(count), np.zeros(len(_steps(layout))), None
    for _ in range(rounds):
        before = _flat(layout, course.standing.parameters)
        epsilon = run_round(course, engine)
        # What two versions tell of the round's noisy sum, and without what all others sent.
        moved = _flat(layout, course.standing.parameters) - before
        scores += ((moved - BETA * momentum) * devices - canaries.honest)[canaries.places]
        momentum = moved
    return Guessed(scores / (rounds * CLIP), canaries.taken, epsilon)


def lower_bound(runs: list[Guessed], share: float) -> tuple[float, int, int]:
    """The least epsilon that the runs together leave possible, with confidence 95%; right guesses; guesses.

    Each run is a mechanism on canaries of its own, so all of them are one on all canaries. `share` of these are guessed
    at: those whose scores are farthest from the middle.
    """
    scores = np.concatenate([each.scores for each in runs]) - 0.5
    taken = np.concatenate([each.taken for each in runs])
    guessed = np.argsort(-np.abs(scores), kind="stable")[: round(share * len(scores))]
    right = int(((scores > 0) == taken)[guessed].sum())
    return epsilon_of_guesses(right, len(guessed), len(scores), DELTA), right, len(guessed)


def _deltas(layout: Layout) -> list[tuple[Update, slice]]:
    """The changes of parameters, and where each lies in the vector."""
    ends = np.cumsum([entries(port) for port in layout.updates]).tolist()
    places = [slice(end - entries(port), end) for port, end in zip(layout.updates, ends)]
    return [(port, place) for port, place in zip(layout.updates, places) if port.kind == "delta"]


def _changes(layout: Layout, vector: NDArray[Any]) -> NDArray[Any]:
    """What a vector has of changes, in one row."""
    return np.concatenate([vector[place] for _, place in _deltas(layout)])


def _steps(layout: Layout) -> Numbers:
    """The step of each of these."""
    return np.concatenate([np.full(entries(port), step(port)) for port, _ in _deltas(layout)])


def _flat(layout: Layout, tensors: Tensors) -> Numbers:
    return np.concatenate([np.asarray(tensors[port.tensor], np.float64).reshape(-1) for port, _ in _deltas(layout)])


def _upload(layout: Layout, change: Numbers) -> dict[str, NDArray[np.float32]]:
    """The update that changes the parameters so; zeros for metrics, which have no part in the noisy sum."""
    whole = np.zeros(layout.length)
    whole[np.concatenate([np.arange(place.start, place.stop) for _, place in _deltas(layout)])] = change
    ends = np.cumsum([entries(port) for port in layout.updates])[:-1]
    return {
        port.name: part.astype(port.dtype).reshape([int(dim) for dim in port.shape])
        for port, part in zip(layout.updates, np.split(whole, ends))
    }
