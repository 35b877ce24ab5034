"""The demo's federation: keys, server, enrolment tokens, devices in their processes, the task and its rounds."""

from __future__ import annotations

import os
import queue
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from archipel.bundle import generate_key
from archipel.cli.start.demo.host import DeviceConfig, HostConfig, HostEvent
from archipel.cli.start.demo.processes import Processes
from archipel.cli.start.demo.results import DeviceRow
from archipel.datasets import DigitsByWriter
from archipel.datasets.splits import seeded_order
from archipel.errors import CommandError
from archipel.operator import OperatorClient, TaskRequest
from archipel.protocol.identity import EnrolmentToken, mint_token
from archipel.protocol.sealed import encode
from archipel.server import init_data_folder, load_settings

POPULATION = "pupils"
VANISH_PER_ROUND = 2
RETRY_SECONDS = 0.25
ENROL_SECONDS = 90.0


@dataclass
class DeviceLog:
    """What one device reported about itself: its id, and the bytes that it sent and received, by round id."""

    name: str
    writer: int
    digits: int
    device_id: str = ""
    sent: dict[str, int] = field(default_factory=dict)
    received: dict[str, int] = field(default_factory=dict)


class Federation:
    """One server and its devices. The server starts when an object is made; `Processes.close` ends it."""

    def __init__(self, folder: Path, processes: Processes, publisher_key: bytes) -> None:
        self._folder = folder
        self._processes = processes
        self._enrolment = generate_key()
        self._publisher_key = publisher_key
        self.data_folder = folder / "server"
        enrolment_public = self._enrolment.public_key().public_bytes_raw()
        self.token = init_data_folder(self.data_folder, enrolment_key=enrolment_public, publisher_keys=[publisher_key])
        self.server_key = load_settings(self.data_folder).public_key
        # All devices are on this machine, so they may ask for work several times a second.
        settings = self.data_folder / "server.toml"
        settings.write_text(settings.read_text() + f"retry_after = {RETRY_SECONDS}\ncheck_in_window = 5.0\n")
        self.address = processes.start_server(self.data_folder)
        self.operator = OperatorClient(self.address, self.token)
        self.devices: dict[str, DeviceLog] = {}

    def start_devices(
        self,
        writers: Sequence[int],
        digits: DigitsByWriter,
        *,
        processes: int,
        rounds: int,
        seed: int,
        image_field: str,
    ) -> None:
        """Spread one agent for each writer over `processes` host processes; two of them vanish in every round."""
        names = [f"pupil-{writer}" for writer in writers]
        vanishing = vanish_plan(names, rounds, seed)
        configs = []
        for name, writer in zip(names, writers, strict=True):
            token = self._folder / "tokens" / f"{name}.token"
            token.parent.mkdir(exist_ok=True)
            token.write_bytes(self.mint())
            home = self._folder / "devices" / name
            configs.append(DeviceConfig(name, int(writer), str(home), str(token), vanishing[name]))
            self.devices[name] = DeviceLog(name, int(writer), len(digits.of([writer])))
        self._processes.start_hosts(
            [HostConfig(os.getpid(), image_field, configs[index::processes]) for index in range(processes)]
        )

    def wait_until_enrolled(self, on_enrolled: Callable[[int], None]) -> None:
        """Wait until every device has an id. Raises CommandError when one fails, or when time is over."""
        deadline = time.monotonic() + ENROL_SECONDS
        while any(not device.device_id for device in self.devices.values()):
            self.collect_events(timeout=0.2)
            on_enrolled(sum(bool(device.device_id) for device in self.devices.values()))
            if time.monotonic() > deadline:
                missing = [device.name for device in self.devices.values() if not device.device_id]
                raise CommandError(f"not enrolled after {ENROL_SECONDS:.0f} s: {', '.join(missing)}")

    def collect_events(self, timeout: float) -> None:
        """Record the events of the hosts, and wait up to `timeout` seconds for the first one.

        Raises CommandError when a process has ended or a device has failed.
        """
        self._processes.check()
        try:
            event = self._processes.events.get(timeout=timeout)
            while True:
                self._record(event)
                event = self._processes.events.get_nowait()
        except queue.Empty:
            return

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

    def rows(self, round_ids: Sequence[str], furthest: Mapping[tuple[str, str], str]) -> list[DeviceRow]:
        """One row of the report for each device.

        Arguments:
            round_ids: the rounds in their order.
            furthest: the last phase that a device answered in, by device id and round id, as the server has it.
        """
        return [
            DeviceRow(
                device.name,
                device.writer,
                device.digits,
                sum(device.sent.values()),
                sum(device.received.values()),
                tuple(furthest.get((device.device_id, round_id), "") for round_id in round_ids),
            )
            for device in self.devices.values()
        ]

    def mint(self) -> bytes:
        """A new one-time enrolment token, as the file that a device's owner gets."""
        seed = secrets.token_bytes(32)
        certificate = mint_token(self._enrolment, population=POPULATION, not_after=int(time.time()) + 86400, seed=seed)
        return encode(
            EnrolmentToken(
                server=self.address,
                server_key=self.server_key,
                enrolment_key=self._enrolment.public_key().public_bytes_raw(),
                publisher_keys=[self._publisher_key],
                population=POPULATION,
                seed=seed,
                certificate=certificate,
            )
        )

    def _record(self, event: HostEvent) -> None:
        device = self.devices[event.device]
        if event.event in ("failed", "refused"):
            raise CommandError(f"{event.device}: {event.text}")
        if event.device_id:
            device.device_id = event.device_id
        if event.round_id:
            # Each event has the bytes of its round so far; the largest number is the whole round's.
            device.sent[event.round_id] = max(event.sent, device.sent.get(event.round_id, 0))
            device.received[event.round_id] = max(event.received, device.received.get(event.round_id, 0))


def vanish_plan(names: Sequence[str], rounds: int, seed: int) -> dict[str, list[int]]:
    """The numbers of the rounds in which each device vanishes: two devices in every round, drawn anew each time."""
    plan: dict[str, list[int]] = {name: [] for name in names}
    for number in range(1, rounds + 1):
        order = seeded_order(range(len(names)), f"vanish {seed} {number}")
        for index in order[:VANISH_PER_ROUND]:
            plan[names[index]].append(number)
    return plan
