"""Workers that are actors of a Ray cluster, one a core or GPU. The cluster's store has data and bundle, put once."""

from __future__ import annotations

import os
import secrets
import socket
import tempfile
from collections.abc import Collection
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from archipel.bundle import Bundle, pack
from archipel.bundle.roles import Personal, State
from archipel.errors import ArchipelError, MissingExtraError, SimulationError
from archipel.library_errors import one_line
from archipel.lite_runtime.engines.delegates import split_device
from archipel.simulation.clients import Clients, ListedClients, SplitClients
from archipel.simulation.crews.worker import Way, Worker, WorkerLost, WorkerSettings, start_workers
from archipel.simulation.work import Work

_CONNECT_SECONDS = 10.0


class Actors:
    """`count` actors in the cluster that Ray is connected to, or else in the one that RAY_ADDRESS or Ray itself finds;
    where there is none, Ray starts one on this machine, which ends with the crew.

    Arguments:
        settings: of the workers. A bundle's folder is sent as an archive. With an engine on a GPU each actor has one.
        bundle: the bundle.
        count: how many; 0: as many as the cluster has cores, or GPUs for an engine on one.
        crews: how many crews work in turn, and so share the cores.

    Raises MissingExtraError without Ray; SimulationError where the cluster is too small, where clients cannot be sent,
    and where an actor does not start.
    """

    def __init__(self, settings: WorkerSettings, bundle: Bundle, count: int, crews: int = 1) -> None:
        if find_spec("ray") is None:
            raise MissingExtraError("ray", "ray")
        import ray

        self._ray = ray
        self._ours = not ray.is_initialized()
        self._actors: list[Any] = []
        self._answers: dict[int, Any] = {}
        self._mark: Path | None = None
        self._work: Any = None
        self._settings: WorkerSettings | None = None
        """What the cluster's store has as `_stored`, for several actors."""
        self._stored: Any = None
        try:
            if self._ours:
                _connect(ray)
            settings, gpus, count = self._resources(settings, count)
            if _keeps(bundle):
                # Whoever does not see this file would keep what devices keep where no other worker finds it.
                settings.states.mkdir(parents=True, exist_ok=True)
                self._mark = settings.states / f".shared-{secrets.token_hex(8)}"
                self._mark.touch()
                settings = replace(settings, shared=self._mark.name)
            self._clients = self._put(settings.clients)
            settings = replace(settings, bundle=_archive(bundle), clients=_NONE)
            self._make = ray.remote(_Actor).options(num_cpus=settings.threads / crews, num_gpus=gpus / crews)
            self._actors = [None] * count
            self.way = start_workers(settings, count, self._start, self._receive_way)
        except BaseException:
            self.close()
            raise

    @property
    def count(self) -> int:
        return len(self._actors)

    def announce(self, work: Work) -> None:
        self._work = self._ray.put(work)
        for actor in self._actors:
            actor.begin.remote(self._work)

    def send(self, worker: int, message: list[int] | str) -> None:
        self._answers[worker] = self._actors[worker].answer.remote(message)

    def wait(self, workers: Collection[int]) -> list[int]:
        ready, _ = self._ray.wait([self._answers[worker] for worker in workers])
        return [worker for worker in workers if self._answers[worker] in ready]

    def receive(self, worker: int, what: str) -> Any:
        try:
            answer = self._ray.get(self._answers[worker])
        except self._ray.exceptions.RayTaskError as error:
            if what != "start":
                raise  # a fault in the program, with its traceback
            last = str(error).strip().splitlines()[-1]
            raise SimulationError(
                f"Ray: worker {worker} does not start: {one_line(last)}; every machine needs archipel, and what the "
                "clients need, as this one has it"
            ) from None
        except self._ray.exceptions.RayError as error:
            raise WorkerLost(f"worker {worker} was lost at {what}: {one_line(error)}") from None
        if isinstance(answer, ArchipelError):
            raise answer
        return answer

    def replace(self, worker: int) -> None:
        assert self._settings is not None, "actors have started"
        self._start(worker, replace(self._settings, client_axis=self.way.client_axis))
        if self._work is not None:
            self._actors[worker].begin.remote(self._work)

    def close(self) -> None:
        """End the actors, and Ray if it was started here."""
        if self._ray.is_initialized():
            for actor in self._actors:
                if actor is not None:
                    self._ray.kill(actor)
            if self._ours:
                self._ray.shutdown()
        self._actors = []
        if self._mark is not None:
            self._mark.unlink(missing_ok=True)

    def _start(self, worker: int, settings: WorkerSettings) -> None:
        self._actors[worker] = self._make.remote()
        if settings is not self._settings:
            self._settings, self._stored = settings, self._ray.put(settings)
        self._answers[worker] = self._actors[worker].start.remote(self._stored, self._clients)

    def _receive_way(self, worker: int) -> Way:
        try:
            way: Way = self.receive(worker, "start")
        except WorkerLost as error:
            raise SimulationError(f"Ray: {error}") from None
        return way

    def _resources(self, settings: WorkerSettings, count: int) -> tuple[WorkerSettings, int, int]:
        """The settings of an actor, its GPUs, and how many actors. Raises SimulationError for too small a cluster."""
        has = self._ray.cluster_resources()
        name, device = split_device(settings.delegates) if isinstance(settings.delegates, str) else ("", "")
        gpus = 0
        if name == "torch" and (device.startswith("cuda") or (device in ("", "auto") and has.get("GPU", 0) >= 1)):
            # Ray shows each actor its own GPU alone.
            gpus, settings = 1, replace(settings, delegates="torch:cuda")
        needs = {"CPU": settings.threads, **({"GPU": gpus} if gpus else {})}
        count = count or max(1, min(int(has.get(kind, 0) // each) for kind, each in needs.items()))
        for kind, each in needs.items():
            if count * each > has.get(kind, 0):
                raise SimulationError(
                    f"workers: {count} need {count * each} {kind}s of the cluster, which has {has.get(kind, 0):g}; "
                    "give fewer workers, or set RAY_ADDRESS to a larger cluster"
                )
        return settings, gpus, count

    def _put(self, clients: Any) -> Any:
        if isinstance(clients, SplitClients):
            # Mapped files are of this machine.
            plain = SplitClients.__new__(SplitClients)
            plain.arrays = {name: np.ascontiguousarray(array) for name, array in clients.arrays.items()}
            plain.order, plain.offsets = clients.order, clients.offsets
            clients = plain
        try:
            return self._ray.put(clients)
        except TypeError as error:
            raise SimulationError(
                f"clients: {one_line(error)}; they cannot be sent to other machines: give SplitClients"
            ) from None


def _connect(ray: Any) -> None:
    """Connect to a cluster that is there, or start one here. Raises SimulationError where RAY_ADDRESS leads nowhere."""
    quiet = {"log_to_driver": False, "configure_logging": False}
    address = os.environ.get("RAY_ADDRESS", "")
    _check_address(address)
    try:
        ray.init(address=address or "auto", **quiet)
    except ConnectionError as error:
        if address:
            raise SimulationError(f"Ray: RAY_ADDRESS is {address}: {one_line(error)}") from None
        # Ray tells its makers how it is used unless this forbids it.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(address="local", include_dashboard=False, **quiet)


def _check_address(address: str) -> None:
    """Raises SimulationError where nobody listens at host:port; Ray itself looks for a quarter of an hour."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not host or not port.isdecimal():
        return
    try:
        socket.create_connection((host, int(port)), _CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise SimulationError(f"Ray: RAY_ADDRESS is {address}: {one_line(error)}") from None


class _Actor:
    """What Ray makes an actor of."""

    def start(self, settings: WorkerSettings, clients: Clients) -> Way | ArchipelError:
        try:
            self._worker = Worker(replace(settings, clients=clients))
        except ArchipelError as error:
            return error
        return self._worker.way

    def begin(self, work: Work) -> None:
        self._worker.begin(work)

    def answer(self, message: list[int] | str) -> Any:
        return self._worker.answer(message)


def _archive(bundle: Bundle) -> bytes:
    with tempfile.TemporaryDirectory(prefix="archipel-simulation-") as folder:
        file = Path(folder) / "given.bundle"
        pack(bundle.folder, file)
        return file.read_bytes()


def _keeps(bundle: Bundle) -> bool:
    """Whether devices keep something from round to round."""
    ports = [port for program in bundle.manifest.programs.values() for port in program.outputs]
    return any(isinstance(port, Personal) or (isinstance(port, State) and port.lifetime == "device") for port in ports)


_NONE = ListedClients([])
"""In the settings that go to the store: the clients lie there by themselves."""
