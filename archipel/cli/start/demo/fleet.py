"""The demo's federation: pupils as devices, two of which vanish in every round, and their task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from archipel.cli.start.demo.results import DeviceRow, RoundRow
from archipel.cli.start.local.federation import LocalFederation
from archipel.cli.start.local.layout import lay_out, mint
from archipel.cli.start.local.processes import Processes
from archipel.cli.start.local.rounds import furthest_phases
from archipel.datasets import DigitsByWriter
from archipel.datasets.splits import seeded_order
from archipel.operator import TaskRequest
from archipel.protocol.operator.tasks import RoundInfo
from archipel.protocol.sealed import encode

POPULATION = "pupils"
VANISH_PER_ROUND = 2


class Federation(LocalFederation):
    """One server and its devices, in `folder`, which has none yet. `Processes.close` ends it."""

    def __init__(
        self,
        folder: Path,
        processes: Processes,
        publisher_key: bytes,
        devices: Mapping[str, Mapping[str, np.ndarray]] | None = None,
    ) -> None:
        laid_out = lay_out(folder, population=POPULATION, publisher=publisher_key, devices=devices or {})
        super().__init__(laid_out, processes)

    @property
    def data_folder(self) -> Path:
        """The server's."""
        return self.layout.server

    def mint(self) -> bytes:
        """A new one-time enrolment token, as the file that a device's owner gets."""
        return encode(mint(self.layout, POPULATION))

    def create_task(self, bundle: Path, *, rounds: int, threshold: int, min_cohort: int, lr: float) -> str:
        """Upload the bundle and start the task; every device is assigned to every round. Returns the task's id."""
        cohort = len(self.devices)
        info = self.operator.bundles.upload(bundle)
        task = self.operator.tasks.create(
            TaskRequest(
                name="digits",
                population=POPULATION,
                bundle=info.digest,
                rounds=rounds,
                min_cohort=min_cohort,
                cohort=cohort,
                threshold=threshold,
                # A round ends as soon as all but the two that vanish have answered.
                goal=cohort - VANISH_PER_ROUND,
                hyperparameters={"lr": lr},
            )
        )
        return task.task_id

    def with_devices(self, info: RoundInfo) -> RoundInfo:
        """The round with its devices as members."""
        return info

    def rows(self, digits: DigitsByWriter, writers: Sequence[int], rounds: list[RoundInfo]) -> list[DeviceRow]:
        """One row of the report for each device; it has the digits of the writer at its place in `writers`."""
        sizes = {device_name(writer): len(digits.of([writer])) for writer in writers}
        return device_rows(self, sizes, rounds)


def device_rows(federation: LocalFederation, sizes: Mapping[str, int], rounds: list[RoundInfo]) -> list[DeviceRow]:
    """One row of the report for each device: its number of examples is in `sizes`, by its name."""
    furthest, rows = furthest_phases(rounds), []
    for name, size in sizes.items():
        device = federation.devices[name]
        reached = tuple(furthest.get((device.device_id, info.round_id), "") for info in rounds)
        rows.append(DeviceRow(name, size, sum(device.sent.values()), sum(device.received.values()), reached))
    return rows


def round_row(federation: LocalFederation, info: RoundInfo, accuracy: float | None = None) -> RoundRow:
    """The report's row of a round that has ended; `accuracy` is that of the version that it made, if measured."""
    names = {device.device_id: device.name for device in federation.devices.values()}
    survivors = tuple(names[device] for device in info.survivors)
    # Those that began in the round and are not in its sum.
    dropped = tuple(names[part.device_id] for part in info.participants if names[part.device_id] not in survivors)
    seconds = (info.ended or info.started) - info.started
    return RoundRow(info.number, info.phase, seconds, accuracy, survivors, dropped, info.reason)


def device_name(writer: int) -> str:
    return f"pupil-{writer}"


def examples_of(digits: DigitsByWriter, writers: Sequence[int], field: str) -> dict[str, dict[str, np.ndarray]]:
    """Each writer's own digits by the name of their device; `field` is the model's input."""
    found: dict[str, dict[str, np.ndarray]] = {}
    for writer in writers:
        own = digits.of([writer])
        found[device_name(writer)] = {field: own.inputs(), "label": own.targets()}
    return found


def vanish_plan(
    names: Sequence[str], rounds: int, seed: int, places: Mapping[str, int] | None = None
) -> dict[str, list[int]]:
    """The numbers of the rounds in which each device vanishes: two devices in every round, drawn anew each time.

    With `places`, the edge server of each device, they are one of each edge server.
    """
    plan: dict[str, list[int]] = {name: [] for name in names}
    for number in range(1, rounds + 1):
        order = [names[index] for index in seeded_order(range(len(names)), f"vanish {seed} {number}")]
        chosen = order[:VANISH_PER_ROUND]
        if places is not None:
            first: dict[int, str] = {}
            for name in order:
                first.setdefault(places[name], name)
            chosen = list(first.values())
        for name in chosen:
            plan[name].append(number)
    return plan
