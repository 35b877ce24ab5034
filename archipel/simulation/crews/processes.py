"""Workers that are processes of this machine, at the other ends of pipes. They map the data from files."""

from __future__ import annotations

import pickle
import subprocess
import sys
import tempfile
from collections.abc import Collection
from dataclasses import replace
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

import numpy as np

from archipel.errors import ArchipelError, SimulationError
from archipel.simulation.clients import SplitClients
from archipel.simulation.crews.worker import SplitFiles, Worker, WorkerSettings, start_workers
from archipel.simulation.work import Work


class Processes:
    """`count` processes. Raises SimulationError for clients that cannot be sent, and where one does not start."""

    def __init__(self, settings: WorkerSettings, count: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="archipel-simulation-")
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pipes: list[Connection] = []
        try:
            if isinstance(settings.clients, SplitClients):
                settings = replace(settings, clients=_write(settings.clients, Path(self._folder.name)))
            for _ in range(count):
                self._spawn()
            self.way = start_workers(settings, count, self._send, lambda number: self.receive(number, "start"))
        except BaseException:
            self.close()
            raise

    @property
    def count(self) -> int:
        return len(self._pipes)

    def announce(self, work: Work) -> None:
        for number in range(self.count):
            self._send(number, work)

    def send(self, worker: int, message: list[int] | str) -> None:
        self._send(worker, message)

    def wait(self, workers: Collection[int]) -> list[int]:
        pipes = {self._pipes[worker]: worker for worker in workers}
        return [pipes[pipe] for pipe in wait(list(pipes))]  # type: ignore[index]

    def receive(self, worker: int, what: str) -> Any:
        try:
            answer = self._pipes[worker].recv()
        except (EOFError, OSError):
            raise self._ended(worker, what) from None
        if isinstance(answer, ArchipelError):
            raise answer
        return answer

    def replace(self, worker: int) -> None:
        """Not here: a process that ends was most often killed for lack of memory, and so would be the next one."""
        raise AssertionError("processes are not replaced")

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

    def _spawn(self) -> None:
        ours, theirs = Pipe()
        # A program of its own, and no copy of this process: that would run the caller's script again, or copy locks.
        program = f"from archipel.simulation.crews.processes import serve; serve({theirs.fileno()})"
        command = [sys.executable, "-c", program]
        self._processes.append(subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL))
        theirs.close()
        self._pipes.append(ours)

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
        worker = Worker(pipe.recv())
        pipe.send(worker.way)
    except ArchipelError as error:
        pipe.send(error)
        return
    while True:
        try:
            message = pipe.recv()
        except (EOFError, OSError):
            return
        if isinstance(message, Work):
            worker.begin(message)
        else:
            pipe.send(worker.answer(message))


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
