"""Divides each device's examples into those that it trains with and those that it is measured on."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from archipel.permutations import permutation
from archipel.simulation.clients import Clients, Examples, SplitClients
from archipel.simulation.draws import drawn_uniform

Rows = NDArray[np.int64]


def hold_out_each(clients: Clients, share: float, seed: int) -> tuple[Clients, Clients]:
    """The devices with the examples that they train with, and with those held out.

    Arguments:
        clients: the devices.
        share: of each device's examples that is held out, rounded, at least one of a device that has two.
        seed: decides which, by the device's number, so that a device's division depends on no other device.
    """
    if not isinstance(clients, SplitClients):
        return _Part(clients, share, seed, held=False), _Part(clients, share, seed, held=True)
    # Split clients stay so, because many of them run at once without copies.
    pairs = []
    for number in range(len(clients)):
        rows = clients.rows(number)
        rest, held = _divide(len(rows), share, seed, number)
        pairs.append((rows[rest], rows[held]))
    rests, helds = ([pair[part] for pair in pairs] for part in (0, 1))
    return SplitClients(clients.arrays, rests), SplitClients(clients.arrays, helds)


class _Part:
    """One of the two parts of clients whose examples are made when they are needed."""

    def __init__(self, clients: Clients, share: float, seed: int, held: bool) -> None:
        self._clients, self._share, self._seed, self._held = clients, share, seed, held

    def __len__(self) -> int:
        return len(self._clients)

    def count(self, number: int) -> int:
        count = self._clients.count(number)
        held = _held(count, self._share)
        return held if self._held else count - held

    def take(self, number: int) -> Examples:
        examples = self._clients.take(number)
        count = len(next(iter(examples.values())))
        rows = _divide(count, self._share, self._seed, number)[int(self._held)]
        return {name: array[rows] for name, array in examples.items()}


def _held(count: int, share: float) -> int:
    return 0 if count < 2 else min(max(round(count * share), 1), count - 1)


def _divide(count: int, share: float, seed: int, number: int) -> tuple[Rows, Rows]:
    """A device's rows: the rest and those held out, both ascending."""
    drawn = int(drawn_uniform("hold out", seed, 0, number) * 2**32)
    order = permutation(count, drawn, 0, 0)
    held = _held(count, share)
    return np.sort(order[held:]), np.sort(order[:held])
