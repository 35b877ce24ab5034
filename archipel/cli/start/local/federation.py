"""A local federation that runs: its server, its devices in their processes, and what they report."""

from __future__ import annotations

import os
import queue
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from archipel.cli.start.local.events import HostEvent
from archipel.cli.start.local.host import DeviceConfig, HostConfig
from archipel.cli.start.local.layout import Layout
from archipel.cli.start.local.processes import Processes
from archipel.errors import CommandError
from archipel.operator import OperatorClient
from archipel.server import load_settings

ENROL_SECONDS = 90.0


@dataclass
class DeviceLog:
    """What one device reported about itself: its id, and the bytes that it sent and received, by round id."""

    name: str
    device_id: str = ""
    sent: dict[str, int] = field(default_factory=dict)
    received: dict[str, int] = field(default_factory=dict)


class LocalFederation:
    """The server and the devices of a folder. The server starts when an object is made; `Processes.close` ends all.

    Raises CommandError where the server does not start.
    """

    def __init__(self, layout: Layout, processes: Processes) -> None:
        self.layout = layout
        self._processes = processes
        self.token = layout.operator_token.read_text().strip()
        self.address = processes.start_server(layout.server, _free_port(layout))
        self.operator = OperatorClient(self.address, self.token)
        self.devices = {name: DeviceLog(name) for name in layout.devices}

    def start_devices(self, processes: int, vanishing: Mapping[str, Sequence[int]] | None = None) -> None:
        """Spread the agents over host processes.

        Arguments:
            processes: how many.
            vanishing: the numbers of the rounds in which a device vanishes, by its name.
        """
        vanishing = vanishing or {}
        configs = [
            DeviceConfig(name, str(self.layout.device(name).absolute()), list(vanishing.get(name, ())))
            for name in self.devices
        ]
        count = min(processes, len(configs))
        self._processes.start_hosts(
            [HostConfig(os.getpid(), self.address, configs[index::count]) for index in range(count)]
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

    def collect_events(self, timeout: float, on_refused: Callable[[str], None] | None = None) -> None:
        """Record the events of the hosts, and wait up to `timeout` seconds for the first one.

        With `on_refused` a device may refuse a round: that is called with the device and its reason.

        Raises CommandError when a process has ended or a device has failed, and else also when it refuses a round.
        """
        self._processes.check()
        try:
            event = self._processes.events.get(timeout=timeout)
            while True:
                self._record(event, on_refused)
                event = self._processes.events.get_nowait()
        except queue.Empty:
            return

    def _record(self, event: HostEvent, on_refused: Callable[[str], None] | None) -> None:
        device = self.devices[event.device]
        if event.event in ("failed", "refused"):
            text = f"device {event.device}: {event.text}"
            if event.event == "failed" or on_refused is None:
                raise CommandError(text)
            on_refused(text)
        if event.device_id:
            device.device_id = event.device_id
        if event.round_id:
            # Each event has the bytes of its round so far; the largest number is the whole round's.
            device.sent[event.round_id] = max(event.sent, device.sent.get(event.round_id, 0))
            device.received[event.round_id] = max(event.received, device.received.get(event.round_id, 0))


def _free_port(layout: Layout) -> int:
    """The port in the server's settings. Raises CommandError where somebody listens there."""
    port = load_settings(layout.server, environment={}).port
    with socket.socket() as probe:
        # As the server does: connections of its last run that the system has not forgotten yet are no obstacle.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            raise CommandError(
                f"port {port} is in use, maybe by this federation, started elsewhere: stop that, or change `port` in "
                f"{layout.server / 'server.toml'}"
            ) from None
    return port
