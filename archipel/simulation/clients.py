"""The devices of a simulated federation: how many there are, and the examples of each."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from archipel.errors import SimulationError

if TYPE_CHECKING:
    import torch

Examples = Mapping[str, NDArray[Any]]
"""A client's examples: `[examples, ...]` by field name."""

_KNOWN_BY = 16


@runtime_checkable
class Clients(Protocol):
    """Devices by number, from 0 on.

    Example:
        class Numbered:
            def __len__(self):
                return 50

            def count(self, number):
                return 8

            def take(self, number):
                return {"input": x[number : number + 8], "label": y[number : number + 8]}

        print(isinstance(Numbered(), Clients))  # True
    """

    def __len__(self) -> int: ...

    def count(self, number: int) -> int:
        """How many examples the device has."""

    def take(self, number: int) -> Examples:
        """The device's examples."""


class SplitClients:
    """One data set, of which each client has some rows; nothing is copied before a client trains.

    Arguments:
        arrays: `[examples, ...]` by field name, with the same number of examples.
        parts: each client's rows, whole numbers `[rows]`, as `datasets.split_iid` and its like return them.

    Raises SimulationError for arrays of different lengths, and for a row that there is not.

    Example:
        parts = datasets.split_iid(len(y), 10, seed=0)
        clients = SplitClients({"input": x, "label": y}, parts)
    """

    def __init__(self, arrays: Examples, parts: Sequence[NDArray[np.integer[Any]]]) -> None:
        self.arrays = dict(arrays)
        counts = {name: len(array) for name, array in self.arrays.items()}
        if len(set(counts.values())) != 1:
            raise SimulationError(f"clients: the fields have {counts} examples; they must have as many each")
        self.order = np.concatenate([np.asarray(part, np.int64) for part in parts]) if parts else np.zeros(0, np.int64)
        self.offsets = np.concatenate([[0], np.cumsum([len(part) for part in parts])]).astype(np.int64)
        total = next(iter(counts.values()))
        if len(self.order) and (self.order.min() < 0 or self.order.max() >= total):
            raise SimulationError(f"clients: a part names a row that is not from 0 to {total - 1}, of the examples")

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def length(self) -> int:
        """The number of examples in `arrays`."""
        return len(next(iter(self.arrays.values())))

    def rows(self, number: int) -> NDArray[np.int64]:
        """The client's rows in `arrays`."""
        return self.order[self.offsets[number] : self.offsets[number + 1]]

    def count(self, number: int) -> int:
        """How many examples the client has."""
        return int(self.offsets[number + 1] - self.offsets[number])

    def take(self, number: int) -> Examples:
        """The client's examples."""
        rows = self.rows(number)
        return {name: array[rows] for name, array in self.arrays.items()}


class ListedClients:
    """Clients whose examples are arrays of their own: of each `[examples, ...]` by field name.

    Example:
        listed = ListedClients([{"input": x[:50], "label": y[:50]}, {"input": x[50:], "label": y[50:]}])
        print(len(listed), listed.count(0))  # 2 50
    """

    def __init__(self, clients: Sequence[Examples]) -> None:
        self._clients = list(clients)

    def __len__(self) -> int:
        return len(self._clients)

    def count(self, number: int) -> int:
        """How many examples the client has."""
        return len(next(iter(self._clients[number].values())))

    def take(self, number: int) -> Examples:
        """The client's examples."""
        return self._clients[number]


class DrawnClients:
    """Clients whose examples are made when they are needed, so that a population of millions takes no memory.

    Arguments:
        population: how many clients there are.
        examples: how many examples each has.
        make: a client's number -> its examples, the same at each call.

    Example:
        clients = DrawnClients(1_000_000, 60, lambda number: (x[number % 10 :: 10], y[number % 10 :: 10]))
    """

    def __init__(self, population: int, examples: int, make: Callable[[int], Examples]) -> None:
        self._population, self._examples, self._make = population, examples, make

    def __len__(self) -> int:
        return self._population

    def count(self, number: int) -> int:
        """How many examples the client has."""
        return self._examples

    def take(self, number: int) -> Examples:
        """The client's examples."""
        return self._make(number)


class _ChangedClients:
    """Clients of which some have other examples, made when they are needed."""

    def __init__(self, clients: Clients, changed: frozenset[int], change: Callable[[Examples], Examples]) -> None:
        self._clients, self._changed, self._change = clients, changed, change

    def __len__(self) -> int:
        return len(self._clients)

    def count(self, number: int) -> int:
        """How many examples the client has."""
        return self._clients.count(number)

    def take(self, number: int) -> Examples:
        """The client's examples."""
        examples = self._clients.take(number)
        return self._change(examples) if number in self._changed else examples


class _OneMoreClient:
    """Clients, and after the last one another."""

    def __init__(self, clients: Clients, examples: Examples) -> None:
        self._clients, self._examples = clients, examples

    def __len__(self) -> int:
        return len(self._clients) + 1

    def count(self, number: int) -> int:
        if number < len(self._clients):
            return self._clients.count(number)
        return len(next(iter(self._examples.values())))

    def take(self, number: int) -> Examples:
        """The client's examples."""
        return self._clients.take(number) if number < len(self._clients) else self._examples


def change_clients(
    clients: Clients, changed: frozenset[int], change: Callable[[Examples], Mapping[str, NDArray[Any]]]
) -> Clients:
    """The clients with what `change` makes of the examples of those numbers; it keeps the number of examples."""
    if not isinstance(clients, SplitClients):
        return _ChangedClients(clients, changed, change)
    # Split clients stay so, because many of them run at once without copies: changed rows go after all others.
    arrays: list[Examples] = [clients.arrays]
    parts, start = [], clients.length
    for number in range(len(clients)):
        rows = clients.rows(number)
        if number in changed:
            arrays.append(change(clients.take(number)))
            rows = np.arange(start, start + len(rows))
            start += len(rows)
        parts.append(rows)
    return SplitClients({name: np.concatenate([each[name] for each in arrays]) for name in clients.arrays}, parts)


def add_client(clients: Clients, examples: Examples) -> Clients:
    """The clients and one more, whose number is the one after the last."""
    if not isinstance(clients, SplitClients):
        return _OneMoreClient(clients, examples)
    arrays = {name: np.concatenate([array, examples[name]]) for name, array in clients.arrays.items()}
    parts = [clients.rows(number) for number in range(len(clients))]
    return SplitClients(arrays, [*parts, np.arange(clients.length, len(next(iter(arrays.values()))))])


def fingerprint(clients: Clients) -> str:
    """A digest of the examples of 16 of the clients, by which a run knows its data again."""
    digest = hashlib.sha256()
    for number in np.unique(np.linspace(0, len(clients) - 1, _KNOWN_BY).astype(np.int64)).tolist():
        for name, array in sorted(clients.take(number).items()):
            digest.update(f"{number} {name} {array.dtype} {array.shape} ".encode())
            digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def as_clients(data: Any, fields: Sequence[str]) -> Clients:
    """Clients from what callers have: Clients, or for each client a mapping from field to array, or a tuple of arrays
    in the order of `fields`. Raises SimulationError that says which client is not like that."""
    if isinstance(data, Clients) and not isinstance(data, Sequence | Mapping):
        return data
    if isinstance(data, Mapping) or not isinstance(data, Sequence):
        raise SimulationError(
            f"clients: expected the examples of each client in a list, got {type(data).__name__}; "
            "SplitClients(arrays, parts) divides one data set"
        )
    listed = []
    for number, client in enumerate(data):
        if isinstance(client, tuple) and len(client) == len(fields):
            client = dict(zip(fields, client))
        if not isinstance(client, Mapping):
            raise SimulationError(
                f"client {number}: expected a mapping with the fields {', '.join(fields)}, or a tuple of their arrays; "
                f"got {type(client).__name__}"
            )
        listed.append({name: np.asarray(array) for name, array in client.items()})
    if not listed:
        raise SimulationError("clients: there are none")
    return ListedClients(listed)


def two_of(array: NDArray[Any]) -> torch.Tensor:
    """Two examples of a field, to export a module with: exporters take a batch of one for a constant."""
    import torch

    return torch.from_numpy(np.ascontiguousarray(np.resize(array, (2, *array.shape[1:]))))
