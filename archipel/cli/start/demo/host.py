"""A process full of devices: `python -m archipel.cli.start.demo.host CONFIG.json`.

Each agent has its own key, folder and session, and its own writer's digits only.
Every line on standard output is one event of one agent, as JSON, for the process that started this one.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import msgspec
import numpy as np

from archipel.client import Agent, AgentConfig, Event
from archipel.datasets import DigitsByWriter, digits_by_writer
from archipel.errors import ArchipelError
from archipel.protocol.identity import EnrolmentToken
from archipel.protocol.sealed import decode
from archipel.server.processes.parent import end_with_parent

STOP_SECONDS = 3.0


class DeviceConfig(msgspec.Struct, forbid_unknown_fields=True):
    """One device: whose digits it holds, its token file, and the rounds (numbers) in which it vanishes."""

    name: str
    writer: int
    folder: str
    token: str
    vanishes: list[int]


class HostConfig(msgspec.Struct, forbid_unknown_fields=True):
    """What the parent tells one host process. `field` is the name of the model's input."""

    parent: int
    field: str
    devices: list[DeviceConfig]


class HostEvent(msgspec.Struct, forbid_unknown_fields=True):
    """One line of output. Bytes are of this round so far."""

    device: str
    event: str
    device_id: str = ""
    round_id: str = ""
    sent: int = 0
    received: int = 0
    text: str = ""


class Device:
    """An agent, its writer's digits, and a simulated battery: unplugged, the agent leaves in the middle of a round."""

    def __init__(self, config: DeviceConfig, field: str, digits: DigitsByWriter, output: Output) -> None:
        self.config = config
        self._output = output
        self._plugged_in = True
        self._number = 0
        fields: dict[str, np.ndarray] = {field: digits.inputs(), "label": digits.targets()}

        def examples() -> dict[str, np.ndarray]:
            return fields

        self.agent = Agent(
            # Not isolated: that would be one more process for each device. `resume_within` is short, so that a device
            # that is unplugged leaves its round for good after half a second.
            AgentConfig(folder=Path(config.folder), isolated=False, resume_within=0.5),
            examples=examples,
            on_event=self._on_event,
            conditions=lambda: self._plugged_in,
        )

    def run(self, stop: threading.Event) -> None:
        token = decode("enrolment token", Path(self.config.token).read_bytes(), EnrolmentToken)
        try:
            with self.agent:
                self.agent.enrol(token)
                self.agent.run_forever(stop)
        except ArchipelError as error:
            self._output.write(HostEvent(device=self.config.name, event="failed", text=str(error)))

    def _on_event(self, event: Event) -> None:
        if event.name == "assigned":
            self._number = int(event.detail["number"])
        # The hardest moment for the others: they have masks in common with this device, whose update is masked but not
        # sent, so these masks can be removed from the sum through its key shares only.
        if event.name == "masked" and self._number in self.config.vanishes:
            self._plugged_in = False
        if event.name == "dropped":
            self._plugged_in = True
        self._output.write(
            HostEvent(
                device=self.config.name,
                event=event.name,
                device_id=event.device_id,
                round_id=event.round_id,
                sent=event.bytes_sent,
                received=event.bytes_received,
                text=str(event.detail.get("reason", "")),
            )
        )


class Output:
    """Standard output of all devices' threads; the lock keeps their lines whole."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def write(self, event: HostEvent) -> None:
        with self._lock:
            sys.stdout.buffer.write(msgspec.json.encode(event) + b"\n")
            sys.stdout.buffer.flush()


def main(path: str) -> None:
    config = msgspec.json.decode(Path(path).read_bytes(), type=HostConfig)
    stop = threading.Event()
    # `sigwait` instead of a handler: a handler that sets an event may interrupt the thread that holds the event's lock.
    # Blocked before any thread starts, because threads inherit the mask.
    signals = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    end_with_parent(config.parent)
    digits = digits_by_writer()
    output = Output()
    devices = [Device(device, config.field, digits.of([device.writer]), output) for device in config.devices]
    del digits
    threads = [threading.Thread(target=device.run, args=(stop,), name=device.config.name) for device in devices]
    for thread in threads:
        thread.start()
    signal.sigwait(signals)
    stop.set()
    deadline = time.monotonic() + STOP_SECONDS
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    # Without `_exit` Python would wait for threads inside a long computation, whose results nobody needs.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
