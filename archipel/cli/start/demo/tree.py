"""The demo's federation over edge servers: the root's members are edge servers, and each of these has some devices."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from archipel.cli.start.demo.fleet import POPULATION, Federation
from archipel.cli.start.local.federation import ENROL_SECONDS, LocalFederation
from archipel.cli.start.local.host import DeviceConfig, HostConfig
from archipel.cli.start.local.layout import lay_out, mint
from archipel.cli.start.local.processes import Processes
from archipel.client.memory.journal import read_entries
from archipel.errors import CommandError
from archipel.operator import TaskRequest
from archipel.protocol.operator.tasks import RoundInfo

SITES = "schools"


def places_of(names: Sequence[str], edges: int) -> dict[str, int]:
    """The number of the edge server that each device is at; all have as many, or one more."""
    return {name: index % edges for index, name in enumerate(names)}


class TreeFederation(Federation):
    """A root server, edge servers and their devices. `Processes.close` ends it."""

    def __init__(
        self,
        folder: Path,
        processes: Processes,
        publisher_key: bytes,
        devices: Mapping[str, Mapping[str, np.ndarray]],
        edges: int,
    ) -> None:
        root = lay_out(folder / "root", population=SITES, publisher=publisher_key, devices={})
        LocalFederation.__init__(self, root, processes)
        places = places_of(list(devices), edges)
        self.edges: dict[str, LocalFederation] = {}
        for place in range(edges):
            name = f"edge-{place + 1}"
            own = {device: fields for device, fields in devices.items() if places[device] == place}
            token = mint(root, SITES, kind="aggregator")
            layout = lay_out(
                folder / name, population=POPULATION, publisher=publisher_key, devices=own, upstream=token
            )  # fmt: skip
            self.edges[name] = LocalFederation(layout, processes)
        self.devices = {name: log for edge in self.edges.values() for name, log in edge.devices.items()}
        self._task_id = ""

    def start_devices(self, processes: int, vanishing: Mapping[str, Sequence[int]] | None = None) -> None:
        """As of LocalFederation; each edge server's devices are in one process at least."""
        vanishing, each = vanishing or {}, max(1, processes // len(self.edges))
        hosts = []
        for edge in self.edges.values():
            configs = [
                DeviceConfig(name, str(edge.layout.device(name).absolute()), list(vanishing.get(name, ())))
                for name in edge.devices
            ]
            hosts += [HostConfig(os.getpid(), edge.address, configs[index::each]) for index in range(each)]
        self._processes.start_hosts(hosts)
        self._wait_for_edges()

    def create_task(self, bundle: Path, *, rounds: int, threshold: int, min_cohort: int, lr: float) -> str:
        """Upload the bundle and start the task of all edge servers. Returns the task's id.

        `threshold` and `min_cohort` are of devices: for them each edge server takes what the policy asks for.
        """
        task = self.operator.tasks.create(
            TaskRequest(
                name="digits",
                population=SITES,
                bundle=self.operator.bundles.upload(bundle).digest,
                rounds=rounds,
                min_cohort=len(self.edges),
                cohort=len(self.edges),
                hyperparameters={"lr": lr},
                levels=1,
            )
        )
        self._task_id = task.task_id
        return task.task_id

    def with_devices(self, info: RoundInfo) -> RoundInfo:
        """The root's round with the devices of all edge servers as members."""
        own = [each for rounds in self.own_rounds(info).values() for each in rounds]
        return msgspec.structs.replace(
            info,
            participants=[part for each in own for part in each.participants],
            survivors=[device for each in own for device in each.survivors] if info.phase == "committed" else [],
        )

    def own_rounds(self, info: RoundInfo) -> dict[str, list[RoundInfo]]:
        """The rounds that each edge server carried out for that one of the root."""
        ended = info.ended or time.time()
        return {
            name: [
                own
                for own in edge.operator.tasks.rounds(self._task_id)
                if own.number == info.number and info.started <= own.started <= ended
            ]
            for name, edge in self.edges.items()
        }

    def root_bytes(self, rounds: Sequence[RoundInfo]) -> dict[str, int]:
        """Bytes of bodies between the root and each edge server in these rounds, both ways."""
        wanted = {info.round_id for info in rounds}
        return {
            name: sum(
                entry.sent + entry.received
                for entry in read_entries(edge.layout.server / "upstream" / "rounds")
                if entry.round_id in wanted
            )
            for name, edge in self.edges.items()
        }

    def _wait_for_edges(self) -> None:
        """Until every edge server is a member of the root."""
        deadline = time.monotonic() + ENROL_SECONDS
        while len(list(self.operator.devices.list(population=SITES))) < len(self.edges):
            self.collect_events(timeout=0.2)
            if time.monotonic() > deadline:
                raise CommandError(f"not all edge servers have joined the root after {ENROL_SECONDS:.0f} s")
