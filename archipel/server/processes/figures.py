"""What the database and the disk say about a server now, as Prometheus metrics that are read when they are asked for.

Figures of the database are the same for all servers of one database. Only the one whose coordinator holds the lease
shows them, so that sums over several servers are right.
"""

from __future__ import annotations

import os
import platform
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily
from sqlalchemy import case, func, select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from archipel import __version__
from archipel.server.database.engine import SCHEMA
from archipel.server.database.fault_tables import Quarantine
from archipel.server.database.server_tables import LeaseRow
from archipel.server.database.tables import LIVE, CheckInRow, Device, Round, Task
from archipel.server.database.task_requests import request_of
from archipel.server.processes.lease import NAME, Lease
from archipel.server.rounds.noise import ledger
from archipel.server.services import Services
from archipel.server.telemetry import shared

SHORTEST_SECONDS = 5.0
"""Figures of the database are at least so old before they are read again."""
SHARE = 20
"""They are read again only after so many times as long as reading them took: scrapes never load the database."""
MOST_POPULATIONS = 100
"""Further populations are added up as OTHERS, which no population can be called."""
OTHERS = "(others)"
SEEN_SECONDS = 600.0


class Figures:
    """A collector of prometheus-client. `lease` is this server's coordinator's."""

    def __init__(self, services: Services, lease: Lease) -> None:
        self._services, self._lease = services, lease
        self._lock = threading.Lock()
        self._kept: list[Metric] = []
        self._next = float("-inf")

    def collect(self) -> Iterator[Metric]:
        yield from self._of_machine()
        leads = self._lease.term is not None
        yield _gauge("archipel_lease_held", "Whether this server's coordinator holds the lease.", {(): float(leads)})
        if leads:
            yield from self._of_database()

    def _of_machine(self) -> Iterator[Metric]:
        settings = self._services.settings
        build = {"version": __version__, "schema": SCHEMA, "python": platform.python_version()}
        yield _gauge("archipel_build_info", "1; the labels say what runs.", {tuple(build.values()): 1}, list(build))
        folders = {"data": settings.folder} if settings.bucket else {
            "data": settings.folder, "blobs": str(settings.blob_folder),
        }  # fmt: skip
        free, size = {}, {}
        for name, folder in folders.items():
            try:
                usage = shutil.disk_usage(folder)
            except OSError:
                continue  # the file store's own errors tell of it
            free[(name,)], size[(name,)] = float(usage.free), float(usage.total)
        yield _gauge("archipel_disk_free_bytes", "Free space where the server keeps its files.", free, ["folder"])
        yield _gauge("archipel_disk_size_bytes", "Size of the disk where they are.", size, ["folder"])
        processes = shared.read_processes(settings) | {"supervisor": os.getppid()}
        memory = {(name,): shared.resident_bytes(number) for name, number in processes.items()}
        began = {(name,): shared.started_at(number) for name, number in processes.items()}
        yield _gauge("archipel_process_resident_bytes", "Memory of a process.", _known(memory), ["process"])
        yield _gauge("archipel_process_start_seconds", "When a process began (Unix).", _known(began), ["process"])

    def _of_database(self) -> list[Metric]:
        with self._lock:
            began = time.monotonic()
            if began >= self._next:
                try:
                    with self._services.database.read() as session:
                        self._kept = list(read_figures(session, now=self._services.clock()))
                except SQLAlchemyError:
                    # Old figures would hide that the database is away; what is counted elsewhere tells of it.
                    self._kept = []
                took = time.monotonic() - began
                self._next = time.monotonic() + max(SHORTEST_SECONDS, SHARE * took)
            return self._kept


def read_figures(session: Session, *, now: float) -> Iterator[Metric]:
    """The figures of the database at `now` (Unix seconds)."""
    expires = session.scalar(select(LeaseRow.expires).where(LeaseRow.name == NAME))
    if expires is not None:
        yield _gauge("archipel_lease_expires_seconds", "When the lease expires (Unix).", {(): expires})
    live = select(Task.kind, Round.phase, func.count()).join(Task).where(Round.ended.is_(None))
    rounds = {(kind, phase): number for kind, phase, number in session.execute(live.group_by(Task.kind, Round.phase))}
    yield _gauge("archipel_rounds_live", "Rounds under way.", rounds, ["kind", "phase"])
    of_tasks = select(Task.kind, Task.state, func.count()).group_by(Task.kind, Task.state)
    tasks = {(kind, state): number for kind, state, number in session.execute(of_tasks)}
    yield _gauge("archipel_tasks", "Tasks, also ended ones.", tasks, ["kind", "state"])
    yield _gauge(
        "archipel_devices", "Devices by what they do now.", _count_devices(session, now), ["population", "state"]
    )
    yield from _privacy(session)


def _count_devices(session: Session, now: float) -> dict[tuple[str, str], float]:
    state = case(
        (Device.revoked.is_not(None), "revoked"),
        ((Quarantine.until > now) & Quarantine.released.is_(None), "set-aside"),
        (CheckInRow.round_id.is_not(None), "in-round"),
        ((CheckInRow.due > now) | (CheckInRow.last_seen > now - SEEN_SECONDS), "waiting"),
        else_="away",
    )
    rows = session.execute(
        select(Device.population, state, func.count())
        .outerjoin(CheckInRow, CheckInRow.device_id == Device.device_id)
        .outerjoin(Quarantine, Quarantine.device_id == Device.device_id)
        .group_by(Device.population, state)
    ).all()
    return _at_most({(population, now_is): float(number) for population, now_is, number in rows})


def _at_most(counts: dict[tuple[str, str], float]) -> dict[tuple[str, str], float]:
    """The counts of the largest populations, and the sums of all others."""
    sizes: dict[str, float] = {}
    for (population, _), number in counts.items():
        sizes[population] = sizes.get(population, 0) + number
    shown = set(sorted(sizes, key=lambda name: (-sizes[name], name))[:MOST_POPULATIONS])
    found: dict[tuple[str, str], float] = {}
    for (population, state), number in counts.items():
        key = (population if population in shown else OTHERS, state)
        found[key] = found.get(key, 0) + number
    return found


def _privacy(session: Session) -> Iterator[Metric]:
    """Of each live task with noise and a limit, what its model has cost and what its account may come to."""
    spent: dict[tuple[str, str], float] = {}
    limits: dict[tuple[str, str], float] = {}
    for task in session.scalars(select(Task).where(Task.state.in_(LIVE)).order_by(Task.created.desc())):
        noise = request_of(task).differential_privacy
        if len(limits) == MOST_POPULATIONS or not noise.is_private or noise.epsilon is None:
            continue
        cost = ledger.spent_by(session, task)
        if cost is not None:
            key = (cost.population, cost.model)
            spent[key] = cost.epsilon
            # Of several tasks on one account the strictest one ends first.
            limits[key] = min(noise.epsilon, limits.get(key, float("inf")))
    names = ["population", "model"]
    yield _gauge("archipel_privacy_epsilon_spent", "Epsilon of all that was released of a model.", spent, names)
    yield _gauge("archipel_privacy_epsilon_limit", "Epsilon that a live task may come to.", limits, names)


def _gauge(name: str, text: str, values: Mapping[Any, float], labels: list[str] | None = None) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=labels or [])
    for key, value in sorted(values.items()):
        family.add_metric(list(key), value)
    return family


def _known(values: Mapping[tuple[str], float | None]) -> dict[tuple[str], float]:
    return {key: float(value) for key, value in values.items() if value is not None}
