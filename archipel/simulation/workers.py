"""Worker processes of a simulation: each keeps its sessions, and answers a part of a round with one running sum.

Data sets lie in memory-mapped files that all workers share. A worker gets a round's tensors once and then the numbers
of clients, a few at a time, whoever is idle next; so slow clients do not hold up the others. Sums of whole numbers are
the same in any order; sums of floating point are put together in the order of the clients, whoever computed which.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

import numpy as np

from archipel.bundle import Bundle, open_bundle
from archipel.errors import ArchipelError, SimulationError
from archipel.lite_runtime.engines.delegates import Delegates
from archipel.simulation.clients import Clients, SplitClients
from archipel.simulation.lanes import MOST_LANES, Lanes
from archipel.simulation.one_by_one import OneByOne
from archipel.simulation.states import StateFolder
from archipel.simulation.work import Engine, Partial, Work

_PARTS = 4
"""A worker gets about so many parts of a round, so that none waits long for the slowest."""
_PLAIN_PART = 8
"""Clients of a part of a plain round, whatever the number of workers: floating point depends on what is added first."""


@dataclass(frozen=True)
class WorkerSettings:
    """What a worker needs to begin."""

    bundle: Path
    publisher: bytes
    clients: SplitFiles | Clients
    states: Path
    client_axis: bool
    threads: int
    delegates: Delegates


@dataclass(frozen=True)
class SplitFiles:
    """SplitClients whose arrays are files of NumPy's format."""

    arrays: dict[str, Path]
    order: Path
    offsets: Path

    def open(self) -> SplitClients:
        clients = SplitClients.__new__(SplitClients)
        clients.arrays = {name: np.load(path, mmap_mode="r") for name, path in self.arrays.items()}
        clients.order, clients.offsets = (np.load(path, mmap_mode="r") for path in (self.order, self.offsets))
        return clients


class Workers:
    """An engine whose clients run in `count` processes.

    Arguments:
        bundle, clients: as of OneByOne; clients that are not SplitClients are sent to each worker, pickled.
        states: the folder of what devices keep.
        count: how many processes, 1 or more.
        client_axis: whether each runs its clients at once (Lanes).
        threads: of each worker, inside one operator.

    Raises SimulationError for clients that cannot be sent, and where a worker does not start.
    """

    def __init__(
        self,
        bundle: Bundle,
        clients: Clients,
        states: Path,
        *,
        count: int,
        client_axis: bool,
        threads: int = 1,
        delegates: Delegates = "cpu",
    ) -> None:
        self._axis = client_axis
        self._folder = tempfile.TemporaryDirectory(prefix="archipel-simulation-")
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pipes: list[Connection] = []
        try:
            given = _write(clients, Path(self._folder.name)) if isinstance(clients, SplitClients) else clients
            settings = WorkerSettings(bundle.folder, bundle.publisher, given, states, client_axis, threads, delegates)
            for _ in range(count):
                self._start(settings)
            for number in range(count):
                self._receive(number, "start")
        except BaseException:
            self.close()
            raise

    def run(self, work: Work, clients: Sequence[int]) -> Partial:
        """The sum of these devices' updates. Raises SimulationError, also where a worker ends."""
        parts = self._divide(work, clients)
        for number in range(len(self._pipes)):
            self._send(number, work)
        waiting = list(enumerate(parts))[::-1]
        running: dict[int, int] = {}
        done: dict[int, Partial] = {}
        idle = list(range(len(self._pipes)))
        while waiting or running:
            while idle and waiting:
                index, part = waiting.pop()
                worker = idle.pop()
                self._send(worker, part)
                running[worker] = index
            for pipe in wait([self._pipes[worker] for worker in running]):
                worker = self._pipes.index(pipe)  # type: ignore[arg-type]
                index = running.pop(worker)
                done[index] = self._receive(worker, f"clients {parts[index][0]} to {parts[index][-1]}")
                idle.append(worker)
        total = Partial(work.empty_sum())
        for index in range(len(parts)):
            total.merge(done[index])
        return total

    def close(self) -> None:
        """End the workers and remove the shared files."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            try:
                process.wait(2)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._pipes, self._processes = [], []
        self._folder.cleanup()

    def _divide(self, work: Work, clients: Sequence[int]) -> list[list[int]]:
        if work.modulus_bits is None:
            size = _PLAIN_PART
        else:
            size = max(1, -(-len(clients) // (len(self._pipes) * (1 if self._axis else _PARTS))))
            size = min(size, MOST_LANES) if self._axis else size
        return [list(clients[first : first + size]) for first in range(0, len(clients), size)]

    def _start(self, settings: WorkerSettings) -> None:
        ours, theirs = Pipe()
        # A program of its own, and no copy of this process: that would run the caller's script again, or copy locks.
        program = f"from archipel.simulation.workers import serve; serve({theirs.fileno()})"
        command = [sys.executable, "-c", program]
        self._processes.append(subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL))
        theirs.close()
        self._pipes.append(ours)
        self._send(len(self._pipes) - 1, settings)

    def _send(self, worker: int, message: Any) -> None:
        try:
            self._pipes[worker].send(message)
        except OSError:
            raise self._ended(worker, "no work") from None
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise SimulationError(
                f"clients: {type(error).__name__}: {error}; they cannot be sent to other processes: give "
                "SplitClients, or workers=1"
            ) from None

    def _receive(self, worker: int, what: str) -> Any:
        try:
            answer = self._pipes[worker].recv()
        except (EOFError, OSError):
            raise self._ended(worker, what) from None
        if isinstance(answer, ArchipelError):
            raise answer
        return answer

    def _ended(self, worker: int, what: str) -> SimulationError:
        process = self._processes[worker]
        try:
            status = process.wait(2)
        except subprocess.TimeoutExpired:
            status = 0
        killed = f"killed by signal {-status}, perhaps for lack of memory" if status < 0 else f"exit status {status}"
        return SimulationError(f"worker {worker} ended ({killed}) at {what}; try fewer workers, or a smaller cohort")


def serve(descriptor: int) -> None:
    """A worker's life: settings, then rounds and clients, until the pipe with this file descriptor closes."""
    pipe = Connection(descriptor)
    try:
        settings: WorkerSettings = pipe.recv()
        engine = _engine(settings)
        pipe.send("ready")
    except ArchipelError as error:
        pipe.send(error)
        return
    work: Work | None = None
    while True:
        try:
            message = pipe.recv()
        except (EOFError, OSError):
            return
        if isinstance(message, Work):
            work = message
        elif work is not None:
            try:
                answer: Partial | ArchipelError = engine.run(work, message)
            except ArchipelError as error:
                answer = error
            pipe.send(answer)


def _engine(settings: WorkerSettings) -> Engine:
    bundle = open_bundle(settings.bundle, [settings.publisher], allow_development=True)
    clients = settings.clients.open() if isinstance(settings.clients, SplitFiles) else settings.clients
    make = Lanes if settings.client_axis else OneByOne
    return make(bundle, clients, StateFolder(settings.states), threads=settings.threads, delegates=settings.delegates)


def _write(clients: SplitClients, folder: Path) -> SplitFiles:
    paths = {}
    for number, (name, array) in enumerate(clients.arrays.items()):
        source = getattr(array, "filename", None)
        paths[name] = folder / f"{number}.npy"
        if isinstance(array, np.memmap) and source is not None and str(source).endswith(".npy"):
            paths[name] = Path(str(source))
        else:
            np.save(paths[name], np.ascontiguousarray(array))
    np.save(folder / "order.npy", clients.order)
    np.save(folder / "offsets.npy", clients.offsets)
    return SplitFiles(paths, folder / "order.npy", folder / "offsets.npy")
