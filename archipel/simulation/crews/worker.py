"""What a worker of a simulation does, wherever it runs, and what a crew of workers offers."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from archipel.bundle import Bundle, open_bundle, release_pages
from archipel.errors import ArchipelError, SimulationError
from archipel.lite_runtime.engines.delegates import Delegates
from archipel.simulation.choosing import choose_client_axis
from archipel.simulation.clients import Clients, Examples, SplitClients
from archipel.simulation.lanes import Lanes
from archipel.simulation.one_by_one import OneByOne
from archipel.simulation.rounds import RoundSettings
from archipel.simulation.states import StateFolder
from archipel.simulation.work import Engine, Partial, Work

HAND_OVER = "hand over"


@dataclass(frozen=True)
class WorkerSettings:
    """What a worker needs to begin.

    `bundle` is its folder, or its archive's bytes for a worker that has other files; `client_axis` whether it runs its
    clients at once, or the rounds for which it measures what is faster; `shared` a file that all workers must see,
    beside the folder of the devices' states, "" where these keep none.
    """

    bundle: Path | bytes
    publisher: bytes
    clients: SplitFiles | Clients
    states: Path
    client_axis: bool | RoundSettings
    threads: int
    delegates: Delegates
    shared: str = ""


class MappedClients(SplitClients):
    """SplitClients whose arrays are files that a worker has mapped for itself, to read.

    A client's rows lie everywhere in them, so after a few clients all pages would count as the worker's memory.
    """

    def take(self, number: int) -> Examples:
        taken = super().take(number)
        for array in self.arrays.values():
            release_pages(array)
        return taken


@dataclass(frozen=True)
class SplitFiles:
    """SplitClients whose arrays are files of NumPy's format."""

    arrays: dict[str, Path]
    order: Path
    offsets: Path

    def open(self) -> SplitClients:
        clients = MappedClients.__new__(MappedClients)
        clients.arrays = {name: np.load(path, mmap_mode="r") for name, path in self.arrays.items()}
        clients.order, clients.offsets = (np.load(path, mmap_mode="r") for path in (self.order, self.offsets))
        return clients


class Way(NamedTuple):
    """How a worker runs its clients: whether at once, and a sentence about it, "" where it was told."""

    client_axis: bool
    why: str = ""


class WorkerLost(Exception):
    """A worker ended before it answered; the text says how. Its crew can start another in its place."""


class Crew(Protocol):
    """Workers by number, from 0 on. Each answers one message after the other, with what `Worker.answer` returns."""

    way: Way
    """How they run their clients, all of them."""

    @property
    def count(self) -> int: ...

    def announce(self, work: Work) -> None:
        """Tell all workers of a round, to which they do not answer."""

    def send(self, worker: int, message: list[int] | str) -> None:
        """Raises SimulationError where the worker has ended."""

    def wait(self, workers: Collection[int]) -> list[int]:
        """Some of these workers, at least one, which have answered."""

    def receive(self, worker: int, what: str) -> Any:
        """The worker's answer to `what`.

        Raises SimulationError that it answered, or where it has ended; or WorkerLost, if another can take its place.
        """

    def replace(self, worker: int) -> None:
        """Start another worker in the place of one that was lost. Its first answer is its way."""

    def close(self) -> None:
        """End the workers."""


def start_workers(
    settings: WorkerSettings, count: int, start: Callable[[int, WorkerSettings], None], receive: Callable[[int], Way]
) -> Way:
    """Have the workers of a crew start, and return their way: where it is measured, the first of them has found it."""
    if isinstance(settings.client_axis, RoundSettings):
        # Not in this process: it would keep the memory of an engine that it does not need.
        start(0, settings)
        way, others = receive(0), range(1, count)
        settings = replace(settings, client_axis=way.client_axis)
    else:
        way, others = Way(settings.client_axis), range(count)
    for number in others:
        start(number, settings)
    for number in others:
        receive(number)
    return way


@dataclass
class Worker:
    """A worker: it keeps an engine with its sessions, the round's tensors, and the sum of what it has computed.

    Raises ArchipelError.
    """

    settings: WorkerSettings
    engine: Engine = field(init=False)
    way: Way = field(init=False)
    work: Work | None = None
    held: Partial | None = None

    def __post_init__(self) -> None:
        settings = self.settings
        if settings.shared and not (settings.states / settings.shared).exists():
            raise SimulationError(
                f"folder: {settings.states}, where devices keep what outlives a round, is not on machine "
                f"{socket.gethostname()}; give a folder on a file system that all machines of the cluster share"
            )
        clients = settings.clients.open() if isinstance(settings.clients, SplitFiles) else settings.clients
        bundle, states, axis = self._bundle(), StateFolder(settings.states), settings.client_axis
        if isinstance(axis, RoundSettings):
            axis, why, measured = choose_client_axis(
                bundle, clients, axis, "auto", settings.threads, settings.delegates
            )  # fmt: skip
            self.way = Way(axis, why)
            if measured is not None:
                self.engine = measured.with_states(states)
                return
        else:
            self.way = Way(axis)
        make = Lanes if axis else OneByOne
        self.engine = make(bundle, clients, states, threads=settings.threads, delegates=settings.delegates)

    def _bundle(self) -> Bundle:
        source, keys = self.settings.bundle, [self.settings.publisher]
        if isinstance(source, Path):
            return open_bundle(source, keys, allow_development=True)
        self._unpacked = tempfile.TemporaryDirectory(prefix="archipel-worker-")
        file = Path(self._unpacked.name) / "given.bundle"
        file.write_bytes(source)
        bundle = open_bundle(file, keys, self._unpacked.name, allow_development=True)
        file.unlink()
        return bundle

    def begin(self, work: Work) -> None:
        """A round begins."""
        self.work, self.held = work, None

    def answer(self, message: list[int] | str) -> Partial | ArchipelError | None:
        """Run these clients: their sum, or None where it is added to what the worker holds, until HAND_OVER asks for
        that."""
        assert self.work is not None, "a round is announced first"
        if message == HAND_OVER:
            held, self.held = self.held, None
            return held
        try:
            partial = self.engine.run(self.work, message)  # type: ignore[arg-type]
        except ArchipelError as error:
            return error
        if not self.work.exact:
            return partial
        if self.held is None:
            self.held = partial
        else:
            self.held.merge(partial)
        return None
